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


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`; to a GPU from pinned memory: a copy from other memory waits for all that
    the stream has to do before it."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor `[len(values)]` on `device`, by the same way as `to_device`."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
