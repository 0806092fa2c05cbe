"""Choice of variants: limits, costs and the mixed-integer program."""
