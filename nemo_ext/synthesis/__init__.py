"""Synthetic data: recipes of steps over endpoints, resumable step by step (docs/synthetic.md)."""
