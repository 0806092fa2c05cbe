"""Rewards: pure functions of verdicts, lengths and scores of a judge, for one response or a group.

Trainers import the function that they need; only `nemo_ext.rl.rewards.rlhf` sends requests to a judge.
"""
