"""One rank of a full-size job, stepped on fake tensors (docs/rehearsal.md)."""
