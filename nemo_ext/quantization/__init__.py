"""Post-training quantisation: a precision plan for ModelOpt, calibration, and checkpoints for vLLM."""
