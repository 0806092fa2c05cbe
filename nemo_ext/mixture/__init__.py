"""Optimal shares of streams, by training many small models on sampled mixtures (docs/data/mixtures.md)."""
