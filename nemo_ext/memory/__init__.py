"""Memory over time: the sampler and its part of the report."""
