"""Stages of curation."""
