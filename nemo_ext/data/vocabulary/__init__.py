"""Training of byte-level BPE tokenizers on a weighted sample of text, and a report that compares them with others."""
