"""Preference pairs: generations -> groups by prompt -> pairs -> filters -> files for TRL and NeMo-RL."""
