"""Moving tokens between rows and pages: store a step's keys and values, gather a context.

On CUDA both are Triton kernels when Triton is there (one launch each, no host sync, so they may
be captured in a graph); the plain versions run anywhere.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton kernels can be used on CUDA tensors."""
    return importlib.util.find_spec("triton") is not None


def store_tokens(
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    key: torch.Tensor,
    value_pages: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
) -> None:
    """Write `key`, `value` `[T, H, D]` at `slots` (int64 `[T]`, page * page_size + offset) of
    `[num_pages, page_size, H, D]` pages (any strides but the last), rounded to their dtype."""
    if key.device.type == "cuda" and has_triton():
        from baton.ops.triton.pages import store

        store(slots, key_pages, key, value_pages, value)
        return
    page, offset = slots // key_pages.shape[1], slots % key_pages.shape[1]
    key_pages[page, offset] = key.to(key_pages.dtype)
    if value is not None and value_pages is not None:
        value_pages[page, offset] = value.to(value_pages.dtype)


def gather_tokens(
    store: torch.Tensor,
    pages: torch.Tensor,
    lengths: Sequence[int],
    bounds: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The first `lengths[i]` tokens of each row of `pages` (int64 `[n, P]`), one sequence after
    the other.

    Args:
        store: pages `[num_pages, page_size, H, D]`, any strides but the last.
        lengths: host ints.
        bounds: int32 `[n + 1]` on the device, the running sum of `lengths`.
        out: `[sum(lengths), H, D]`, contiguous; written and returned, in its own dtype.
    """
    if out.device.type == "cuda" and has_triton():
        from baton.ops.triton.pages import gather

        gather(store, pages, max(lengths), bounds, out)
        return out
    size, start = store.shape[1], 0
    for table, length in zip(pages, lengths, strict=True):
        tokens = store[table[: -(-length // size)]].flatten(0, 1)[:length]
        out[start : start + length] = tokens
        start += length
    return out
