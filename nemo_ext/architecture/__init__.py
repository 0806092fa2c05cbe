"""Block patterns of models: notation, cost model and pipeline cuts. Pure Python without torch."""
