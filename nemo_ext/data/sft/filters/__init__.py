"""Filters of samples, one per file; `screen.py` applies them in order and counts the reasons.

Most filters judge each sample separately. Near duplicates and duplicate ids concern the whole corpus, so a worker
makes a small sketch of each sample, and a final pass over all sketches decides which samples to drop.
"""
