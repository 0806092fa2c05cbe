"""FFN fusion: which blocks may run side by side, and their weights as one."""
