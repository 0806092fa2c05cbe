"""Stages that run a model."""
