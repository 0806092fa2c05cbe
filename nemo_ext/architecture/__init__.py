"""The block sequence: notation, cost, pipeline cuts. Pure Python, no torch, nothing of ours but `job`."""
