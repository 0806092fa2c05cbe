"""Memory over time: the sampler and its section of the report."""
