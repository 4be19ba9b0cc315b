"""Causal attention of equal sequences for training, by whatever is fastest here."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_CANDIDATES = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
)  # fmt: skip
_chosen: dict[int, SDPBackend] = {}  # by length


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, window: int
) -> torch.Tensor:
    """`[N, heads, D]` of `batch` sequences -> the same; `window` 0 sees everything before."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    out = _windowed(q, k, v, window) if 0 < window < q.shape[2] else _causal(q, k, v)
    return out.transpose(1, 2).flatten(0, 1)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length = q.shape[2]
    if length not in _chosen:
        _chosen[length] = _fastest(q, k, v)
    with sdpa_kernel(_chosen[length]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Blocks of `window` tokens; a query sees its own block up to itself and the block before."""
    blocks, rest = divmod(q.shape[2], window)
    if rest:
        raise ValueError(f"a length of {q.shape[2]} is no multiple of the window of {window}")
    q, k, v = (x.unflatten(2, (blocks, window)).transpose(1, 2) for x in (q, k, v))
    first = F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], is_causal=True)[:, None]
    if blocks > 1:
        seen = torch.ones(window, 2 * window, dtype=torch.bool, device=q.device).tril(window)
        k, v = (torch.cat((x[:, :-1], x[:, 1:]), 3).flatten(0, 1) for x in (k, v))
        rows = q[:, 1:].flatten(0, 1)
        more = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen[None, None])
        first = torch.cat((first, more.unflatten(0, (-1, blocks - 1))), 1)
    return first.transpose(1, 2).flatten(2, 3)


def _fastest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> SDPBackend:
    """Times a forward and a backward of each candidate; one that fails is out."""
    took = {}
    with torch.enable_grad():
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        for backend in _CANDIDATES:
            try:
                for _ in range(3):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    with sdpa_kernel(backend):
                        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
                    out.backward(out.detach())
                    torch.cuda.synchronize()
                    took[backend] = time.perf_counter() - start
            except RuntimeError:
                took.pop(backend, None)
    return min(took, key=lambda backend: took[backend])
