"""Batch generation: any number of workers send rows to an endpoint; jobs can be resumed (docs/generate.md)."""
