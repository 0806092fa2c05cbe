"""Block sequences as Megatron-Core modules, and their integration with Megatron's own trainer."""
