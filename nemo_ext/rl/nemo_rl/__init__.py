"""Adapter for NeMo-RL, which is imported only when it is used."""
