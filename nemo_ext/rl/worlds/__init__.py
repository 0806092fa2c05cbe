"""Worlds: databases with tools for a model to work with. They import no training framework."""
