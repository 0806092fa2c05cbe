"""Plug-ins for NeMo-RL, which is imported only when it is used."""
