"""Whole keys of un-absorbed MLA: every head's own part beside the rotated part all heads share."""

from __future__ import annotations

import torch

from baton.ops.kv_pages import has_triton


def join_keys(own: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out[t, h] = own[t, h] ++ shared[t]`.

    Args:
        own: `[T, H, N]`, last dim contiguous.
        shared: `[T, R]`, last dim contiguous.
        out: `[T, H, N + R]`, contiguous, of the same dtype; written and returned.
    """
    if out.device.type == "cuda" and has_triton():
        from baton.ops.triton.mla_keys import join

        join(own, shared, out)
        return out
    out[..., : own.shape[-1]] = own
    out[..., own.shape[-1] :] = shared[:, None]
    return out
