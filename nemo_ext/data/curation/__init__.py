"""Curation: raw documents through filters and deduplication to text that is ready for training, all of it counted."""
