"""Sources of documents, tokenizers, and writing of Megatron's indexed files."""
