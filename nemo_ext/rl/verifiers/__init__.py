"""Verifiers: whether a response solves its task. They import no framework and never raise on what a model wrote."""
