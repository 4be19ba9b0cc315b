"""Which tensors go to a Triton kernel instead of the plain PyTorch of the same operation."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@cache
def has_triton() -> bool:
    """Triton can be imported here."""
    return importlib.util.find_spec("triton") is not None


def on_gpu(*tensors: torch.Tensor) -> bool:
    """Kernels can take these: all on a GPU, in one dtype that they compute in."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in _FLOATS
        and all(t.is_cuda and t.dtype == first.dtype for t in tensors)
        and has_triton()
    )


def int_kernels(first: torch.Tensor) -> bool:
    """Kernels of integers alone can take this tensor and those beside it."""
    return first.is_cuda and has_triton()
