"""Rewards: pure functions of verdicts, lengths and a judge's scores, for one response or a group.

Trainers import the function that they need; only `nemo_ext.rl.rewards.rlhf` asks a judge.
"""
