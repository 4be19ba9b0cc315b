"""Between attention's projections and attention: norms, rotation, and storing in pages."""

from __future__ import annotations

import torch

from baton.core.kv import KVView
from baton.ops.dispatch import on_gpu
from baton.ops.norm import rms_norm
from baton.ops.rope import Rotation


def gqa_heads(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: Rotation,
    view: KVView,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm and rotate queries and keys; store keys and values.

    Args:
        qkv: `[T, (Hq + 2 Hk) D]`: queries, keys, values.
        heads: Hq, Hk.
        norms: weights `[D]` of the norms on each query and key head, or None.
        eps: of the norms.
        rotation: this step's, over the first `rope.dim` columns of a head.
        view: this layer's pages.
        slots: where each token goes, int64 `[T]`.

    Returns:
        `(q [T, Hq, D], k [T, Hk, D], v [T, Hk, D])`, v a view of `qkv`.
    """
    num_q, num_kv = heads
    dim = qkv.shape[-1] // (num_q + 2 * num_kv)
    paged = view.paged() if on_gpu(qkv, *(norms or ())) else None
    if paged is not None and qkv.stride(-1) == 1:
        from baton.ops.triton import qkv as kernels

        angles = rotation.cos, rotation.sin, rotation.interleaved
        return kernels.gqa_heads(qkv, heads, norms, eps, angles, paged, slots)
    parts = torch.split(qkv, [num_q * dim, num_kv * dim, num_kv * dim], -1)
    q, k, v = (part.reshape(qkv.shape[0], -1, dim) for part in parts)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    q, k = rotation(q), rotation(k)
    view.store(slots, k, v)
    return q, k, v


def mla_heads(
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: Rotation,
    view: KVView,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries; norm the latent, rotate the key beside it, store both.

    Args:
        q: `[T, H, nope + rope]`. Rows of it and of `kv` may be any distance apart.
        kv: `[T, rank + rope]`: the latent, and the rotated key that all heads share.
        weight: `[rank]` of the latent's norm.
        eps: of that norm.
        rotation: this step's, over the `rope` columns.
        view: this layer's pages.
        slots: where each token goes, int64 `[T]`.

    Returns:
        `q` and `kv`, done; on a GPU the tensors given are overwritten.
    """
    rope = 2 * rotation.cos.shape[-1]
    paged = view.paged() if on_gpu(q, kv, weight) else None
    if paged is not None and q.stride()[1:] == (q.shape[2], 1) and kv.stride(-1) == 1:
        from baton.ops.triton import qkv as kernels

        angles = rotation.cos, rotation.sin, rotation.interleaved
        return kernels.mla_heads(q, kv, weight, eps, angles, paged[0], slots)
    nope, rank = q.shape[-1] - rope, kv.shape[-1] - rope
    q = torch.cat((q[..., :nope], rotation(q[..., nope:])), -1)
    shared = rotation(kv[:, None, rank:])[:, 0]
    latent = torch.cat((rms_norm(kv[:, :rank], weight, eps), shared), -1)
    view.store(slots, latent[:, None], None)
    return q, latent
