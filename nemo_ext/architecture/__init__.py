"""Block patterns: notation, cost model and pipeline cuts. Pure Python without torch, based only on our `job`."""
