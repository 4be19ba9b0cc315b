"""Around latent attention: whole keys where it is un-absorbed, products per head where it is."""

from __future__ import annotations

import torch

from baton.ops.dispatch import on_gpu
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


def head_products(x: torch.Tensor, weight: torch.Tensor, early: bool = False) -> torch.Tensor:
    """`out[t, h] = x[t, h] @ weight[h]`.

    Args:
        x: `[T, H, K]`, K up to 1024, any strides but the last.
        weight: `[H, K, N]`, any strides, of the same dtype.
        early: what was launched last did not write x, which was there before that began: on a GPU
            it may be read while that still runs.

    Returns:
        `[T, H, N]`, contiguous, summed in float32 (float64 for float64).
    """
    if on_gpu(x, weight) and x.stride(-1) == 1:
        from baton.ops.triton import heads as kernels

        return kernels.head_products(x, weight, early)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
