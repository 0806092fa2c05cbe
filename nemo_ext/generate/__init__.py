"""Batch generation: rows sent to an endpoint by any number of workers, resumable (docs/generate.md)."""
