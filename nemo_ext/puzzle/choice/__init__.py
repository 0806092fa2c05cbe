"""Choice of variants under limits on their costs, by a mixed-integer program."""
