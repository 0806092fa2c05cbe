"""Shares of streams by the losses of many small models trained on sampled mixtures (docs/data/mixtures.md)."""
