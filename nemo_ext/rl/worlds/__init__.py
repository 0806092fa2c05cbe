"""Worlds: databases with tools, in which a model has work to do. They import no framework."""
