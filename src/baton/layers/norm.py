"""RMSNorm with its weight."""

from __future__ import annotations

import torch

from baton.layers.weights import Fill, LayerContext, Source, Weighted
from baton.ops.norm import add_rms_norm, embed_rms_norm, rms_norm


class RMSNorm(Weighted):
    """RMSNorm over the last dimension of width `size`; replicated on every rank."""

    def __init__(self, context: LayerContext, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight: torch.Tensor
        self.declare("weight", (size,), context.dtype)
        source = Source(f"{name}.weight", (size,), (slice(None),))
        self.fills.append(Fill("weight", (slice(None),), (source,), dummy="one"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`."""
        return rms_norm(x, self.weight, self.eps)

    def embed(self, ids: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(rows), rows)` for the rows `ids` (int64 `[T]`) of `table [vocab, size]`."""
        return embed_rms_norm(ids, table, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(x + residual), x + residual)`."""
        return add_rms_norm(x, residual, self.weight, self.eps)
