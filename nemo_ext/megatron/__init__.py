"""The block sequence as Megatron-Core modules, and the glue to Megatron's own trainer."""
