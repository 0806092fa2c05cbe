"""Puzzle: compresses a parent model into a smaller one, assembled from variants of the parent's blocks.

Source: arXiv 2411.19146, and section 2 of the Llama-Nemotron report. The search is a mixed-integer program that picks
one variant per block with the lowest total score, under limits on the total cost. `problem` defines it, and
`integer_program` solves it with HiGHS; `search`, `pool` and `sweep` are the entry points.
"""
