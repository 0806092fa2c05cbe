"""What lets Megatron run where there is no CUDA: device redirection, patches, torch kernels."""
