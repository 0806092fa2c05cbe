"""Block-by-block access to a model on data-parallel ranks."""
