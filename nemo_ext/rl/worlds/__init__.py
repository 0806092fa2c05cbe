"""Worlds: databases with tools, which a model works with. They import no framework."""
