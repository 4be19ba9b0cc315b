"""Softmax attention with its log-sum-exp, and the exact merge of two partial results.

The merge is the rescaling of FlashAttention (arXiv 2205.14135, 3.1) applied between calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.ops.dtypes import wide
from baton.ops.kv_pages import has_triton

_SCORE_ELEMENTS = 1 << 24  # most score elements that the plain path holds at once


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q k^T + mask) v`, query heads sharing KV heads in groups.

    Args:
        q: `[B, Hq, Lq, Dk]`.
        k: `[B, Hk, Lk, Dk]`, Hk divides Hq.
        v: `[B, Hk, Lk, Dv]`.
        scale: on the scores.
        causal: query i sees keys 0..i; needs `Lq == Lk`.
        mask: added to the scores, in q's dtype, broadcastable to `[B, Hq, Lq, Lk]`. Masked keys
            and values must still be finite: `0 * NaN` is NaN.

    Returns:
        `(out [B, Hq, Lq, Dv] in q's dtype, lse [B, Hq, Lq] float32, or float64 for float64)`.
    """
    width = v.shape[-1]
    if q.device.type != "cpu" or width > k.shape[-1]:
        return attend_plain(q, k, v, scale, causal, mask)
    if width < k.shape[-1]:
        # The fused kernel wants one head width; zero columns of V cost less than a plain softmax.
        v = F.pad(v, (0, k.shape[-1] - width))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out[..., :width], lse


def attend_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` written out, in blocks of queries; runs anywhere and is the oracle."""
    batch, heads, queries, _ = q.shape
    group, keys = heads // k.shape[1], k.shape[2]
    dtype = wide(q.dtype)
    k = k.to(dtype).repeat_interleave(group, 1)
    v = v.to(dtype).repeat_interleave(group, 1)
    out = q.new_empty(batch, heads, queries, v.shape[-1])
    lse = q.new_empty(batch, heads, queries, dtype=dtype)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, keys)
    column = torch.arange(keys, device=q.device)
    step = max(1, _SCORE_ELEMENTS // max(1, batch * heads * keys))
    for start in range(0, queries, step):
        stop = min(queries, start + step)
        scores = (q[:, :, start:stop].to(dtype) * scale) @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores + mask[:, :, start:stop]
        if causal:
            row = torch.arange(start, stop, device=q.device)
            scores = scores.masked_fill(column > row[:, None], -torch.inf)
        lse[:, :, start:stop] = scores.logsumexp(-1)
        out[:, :, start:stop] = (scores.softmax(-1) @ v).to(q.dtype)
    return out, lse


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from each set's result.

    Args:
        out_a, out_b: `[..., D]`, one dtype.
        lse_a, lse_b: `[...]`; -inf says that the set was empty, its `out` is then ignored.

    Returns:
        `(out, lse)` with the inputs' shapes and dtypes; zeros and -inf where both are empty.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse.isneginf(), 0.0)
    weight_a, weight_b = (lse_a - base).exp()[..., None], (lse_b - base).exp()[..., None]
    part_a = torch.where(weight_a > 0, out_a * weight_a, 0.0)
    part_b = torch.where(weight_b > 0, out_b * weight_b, 0.0)
    return (part_a + part_b).to(out_a.dtype), lse


def merge_into(
    acc: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """`merge` in place: fold `(out, lse)` into the running `(acc, acc_lse)`.

    Args:
        acc: `[T, H, D]`, contiguous, float32 (float64 for float64 models).
        acc_lse: `[T, H]`, contiguous, acc's dtype.
        out: `[T, H, D]`, any dtype, last dim contiguous.
        lse: `[T, H]`, any strides.
    """
    if acc.device.type == "cuda" and has_triton():
        from baton.ops.triton import merge as kernels

        kernels.merge_into(acc, acc_lse, out, lse)
        return
    merged, new_lse = merge(acc, acc_lse, out.to(acc.dtype), lse.to(acc_lse.dtype))
    acc.copy_(merged)
    acc_lse.copy_(new_lse)
