"""A model opened up block by block, on ranks that share out the data."""
