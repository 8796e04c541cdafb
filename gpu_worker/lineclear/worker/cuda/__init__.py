"""Computation on NVIDIA GPUs: a fused forward pass and its Triton kernels."""
