"""Synthetic data generated with models behind endpoints, by recipes of resumable steps (docs/synthetic.md)."""
