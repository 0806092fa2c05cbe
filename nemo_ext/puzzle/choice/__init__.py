"""The choice of blocks: limits, costs and the mixed-integer program."""
