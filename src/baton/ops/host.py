"""The host's side of tensors: settings of its memory, and copies from it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed instead of giving it back to the kernel.

    A step allocates and frees tensors of megabytes by the hundred; given back each time, their
    pages are faulted in again each time, which can cost more than the arithmetic. Memory use
    stays at its peak. Blocks over 32 MiB (glibc's own limit) are still given back.

    Returns:
        Whether the allocator took it; False on anything but glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, value) == 1
        for option, value in (
            (_M_MMAP_THRESHOLD, 32 << 20),
            (_M_TRIM_THRESHOLD, (1 << 31) - 1),
            (_M_TOP_PAD, 64 << 20),
        )
    )


def upload(
    values: torch.Tensor | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A host tensor, or values as one `[len(values)]` of `dtype`, on `device`."""
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return _staged(host, device).to(device, non_blocking=True)


def refill(place: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a host tensor into `place`, which graphs read."""
    place.copy_(_staged(host, place.device), non_blocking=True)


def _staged(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In pinned memory where it goes to a GPU: a copy from other memory waits for all that the
    stream has to do before it."""
    return host.pin_memory() if device.type == "cuda" else host
