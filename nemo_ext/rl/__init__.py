"""Reinforcement learning: tasks, verifiers and rewards, with an adapter for each engine in a folder of its name."""
