"""Data: document sources, tokenisation, and blends. Does not import torch at module level."""
