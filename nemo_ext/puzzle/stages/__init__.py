"""Puzzle stages that run a model."""
