"""Client for OpenAI-compatible endpoints, used by jobs that send rows to a model and store its answers."""
