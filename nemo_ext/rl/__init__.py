"""Reinforcement learning: tasks, verifiers and rewards, and an adapter per engine, in a folder named after it."""
