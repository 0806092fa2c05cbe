"""Documents into Megatron's indexed files."""
