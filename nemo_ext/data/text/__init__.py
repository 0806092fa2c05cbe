"""Text data: sources of documents, tokenizers, and writers of Megatron's indexed files."""
