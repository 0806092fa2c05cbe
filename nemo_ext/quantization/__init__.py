"""Post-training quantisation: applies a precision plan to a model with ModelOpt, and writes checkpoints for vLLM."""
