"""Support for running Megatron without CUDA: device redirection, patches and torch kernels."""
