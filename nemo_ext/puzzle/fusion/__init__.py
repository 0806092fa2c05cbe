"""FFN fusion: which blocks may run in parallel, and their weights merged into one."""
