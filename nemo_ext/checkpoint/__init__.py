"""Conversion of checkpoints between Hugging Face and Megatron's torch_dist format, and merging of checkpoints."""
