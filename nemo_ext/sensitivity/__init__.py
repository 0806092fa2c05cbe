"""Which blocks need more than FP8, and the precision plan that keeps a loss budget at the fewest BF16 bytes."""
