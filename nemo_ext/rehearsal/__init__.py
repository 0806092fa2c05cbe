"""Rehearsal: runs one step of single ranks of a full-size job on fake tensors (see docs/rehearsal.md)."""
