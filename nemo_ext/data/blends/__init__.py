"""Which streams are trained on, in which shares."""
