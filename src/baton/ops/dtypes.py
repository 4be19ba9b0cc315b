"""Which dtype a computation runs in."""

from __future__ import annotations

import torch

_NAMES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums, norms, softmax and routing: float32, or float64 for float64 models."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype called `name`.

    Raises:
        ValueError: for a name that is not one of Baton's dtypes.
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in _NAMES:
        raise ValueError(f"unknown dtype {name!r}: one of {sorted(_NAMES)}")
    return _NAMES[name]
