"""Quantisation after training: a precision plan for ModelOpt, calibration, and checkpoints for vLLM."""
