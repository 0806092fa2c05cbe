"""Sensitivity of blocks to FP8, and the precision plan that meets a loss budget with the fewest BF16 bytes."""
