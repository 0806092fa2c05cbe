"""Rewards: pure functions from verdicts, lengths and a judge's scores to numbers, of one response or of a group.

Whoever trains imports the function it means; `nemo_ext.rl.rewards.rlhf` is the one that asks a judge.
"""
