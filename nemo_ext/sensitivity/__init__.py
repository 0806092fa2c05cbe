"""Sensitivity of blocks to FP8 and NVFP4, and the precision plan that is best within a budget of loss or bits."""
