"""Curation stages: filters of single documents, and barriers that compare all of them."""
