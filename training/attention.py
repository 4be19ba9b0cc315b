"""Causal attention of equal sequences for training, by whatever is fastest here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_CANDIDATES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
_chosen: dict[tuple[int, ...], SDPBackend] = {}


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
    key = tuple(q.shape)
    if key not in _chosen:
        _chosen[key] = _fastest(q, k, v)
    with sdpa_kernel(_chosen[key]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Blocks of `window` queries, each of which sees its own block and the one before."""
    batch, heads, length, _ = q.shape
    blocks = length // window
    if length % window:
        raise ValueError(f"a length of {length} is no multiple of the window of {window}")

    def pair(x: torch.Tensor) -> torch.Tensor:
        own = x.unflatten(2, (blocks, window)).transpose(1, 2)
        before = torch.cat((own[:, :1], own[:, :-1]), 1)
        return torch.cat((before, own), 3).flatten(0, 1)

    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)[None] - window
    seen = (column <= row) & (column > row - window)
    first = seen & (column >= 0)
    mask = torch.stack([first] + [seen] * (blocks - 1)).repeat(batch, 1, 1)[:, None]
    rows = q.unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
    out = F.scaled_dot_product_attention(rows, pair(k), pair(v), attn_mask=mask)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)


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
