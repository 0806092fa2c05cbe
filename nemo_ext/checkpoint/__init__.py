"""Checkpoints: Hugging Face and Megatron's torch_dist in both directions, and merging."""
