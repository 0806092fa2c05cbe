"""Memory use of a run over time: the sampler, and the report's section on it."""
