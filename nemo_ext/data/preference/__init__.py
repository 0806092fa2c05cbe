"""Preference data: groups generations by prompt, pairs and filters them, and writes files for TRL and NeMo-RL."""
