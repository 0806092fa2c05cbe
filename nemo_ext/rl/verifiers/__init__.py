"""Verifiers of responses to tasks. They import no framework and never raise on model output."""
