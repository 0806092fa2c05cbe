"""Optimal shares of streams, found by training many small models on sampled mixtures (docs/data/mixtures.md)."""
