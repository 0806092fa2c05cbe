"""Choice of blocks: limits, costs and the mixed-integer program."""
