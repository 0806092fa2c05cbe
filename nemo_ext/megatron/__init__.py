"""The block sequence as Megatron-Core modules, and its integration with Megatron's own trainer."""
