"""Triton kernels for NVIDIA GPUs. Imported only when a CUDA device is in use."""
