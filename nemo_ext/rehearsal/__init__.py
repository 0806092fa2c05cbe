"""Rehearsal: runs one step on individual ranks of a full-size job, using fake tensors (see docs/rehearsal.md)."""
