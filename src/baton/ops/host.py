"""The host's side of tensors: settings of its memory, and copies from it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import chain

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


def staging(shape: int | Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A host tensor to be filled, by `numpy()`, and copied to `device` with `non_blocking`.

    Pinned where it goes to a GPU: a copy from other memory waits for all that the stream has to do
    before it. Pinned memory that was freed is given out again, which takes microseconds, and not
    before the copies from it have been made (PyTorch's caching host allocator).
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(
    values: torch.Tensor | Sequence[float],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """A host tensor, or values as one `[len(values)]` of `dtype`, on `device`.

    Raises:
        AssertionError: a CUDA graph is being captured. It would copy from the same place again
            whenever it runs, whatever lies there then.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AssertionError("a copy from host memory has no place in a CUDA graph")
    if isinstance(values, torch.Tensor):
        host = values.pin_memory() if device.type == "cuda" else values
    else:
        host = staging(len(values), device, dtype)
        host.numpy()[:] = values
    return host.to(device, non_blocking=True)


def upload_together(parts: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Each of `parts` as int64 `[len(part)]` on `device`, all in one copy."""
    whole = upload([*chain.from_iterable(parts)], device)
    return list(whole.split_with_sizes([len(part) for part in parts]))
