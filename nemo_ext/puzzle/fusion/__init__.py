"""FFN fusion: finds blocks that may run in parallel, and merges their weights into one block."""
