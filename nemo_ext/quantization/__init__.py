"""Post-training quantisation: calibrates a model with ModelOpt by a precision plan, and writes checkpoints for vLLM."""
