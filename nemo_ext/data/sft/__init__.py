"""SFT data: read conversations, filter, render with a chat template, mask, sample, pack, report."""
