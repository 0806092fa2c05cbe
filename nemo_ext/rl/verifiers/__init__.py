"""Verifiers that judge responses to tasks. They import no training framework and never raise on model output."""
