"""Block patterns: notation, cost model and pipeline cuts. Pure Python without torch; imports only our `job`."""
