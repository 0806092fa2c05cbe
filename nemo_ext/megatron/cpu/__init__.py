"""Support for Megatron without CUDA: device redirection, patches, torch kernels."""
