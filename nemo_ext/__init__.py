"""Plug-ins for Megatron-Core and NeMo: one block notation, four model families, no forks."""

__version__ = "0.1.0"
