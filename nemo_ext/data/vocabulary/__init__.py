"""Tokenizers trained on text: a sample by weights, byte-level BPE, and what it makes of text beside others."""
