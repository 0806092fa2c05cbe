"""Clients of OpenAI-compatible endpoints, for jobs that send rows to a model and store its answers."""
