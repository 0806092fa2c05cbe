"""Rewards for a response or a group, as pure functions of verdicts, lengths and a judge's scores.

Trainers import the functions they need. Only `nemo_ext.rl.rewards.rlhf` sends requests to a judge.
"""
