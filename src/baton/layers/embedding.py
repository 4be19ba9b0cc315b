"""Token embedding and output head, both split over ranks by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.layers.norm import RMSNorm
from baton.layers.weights import Fill, LayerContext, Source, Weighted
from baton.ops.dtypes import wide

_HEAD_ROWS = 8192  # vocabulary rows widened at once on a device without a wide-output GEMM


class VocabWeight(Weighted):
    """`[vocab / ranks, hidden]`; the last rank's share is padded with zero rows.

    Used as the embedding, as the head, or as both when they are tied.
    """

    columns_first = frozenset({"weight"})

    def __init__(self, context: LayerContext, name: str, vocab: int, hidden: int) -> None:
        super().__init__()
        self.group, self.vocab = context.group, vocab
        self.rows = -(-vocab // self.group.size)
        self.start = self.group.rank * self.rows
        used = max(0, min(self.rows, vocab - self.start))
        self.weight: torch.Tensor
        self.declare("weight", (self.rows, hidden), context.dtype)
        if used:
            taken = (slice(self.start, self.start + used), slice(None))
            source = Source(f"{name}.weight", (vocab, hidden), taken)
            self.fills.append(Fill("weight", (slice(0, used), slice(None)), (source,)))
        if used < self.rows:
            self.fills.append(Fill("weight", (slice(used, None), slice(None)), (), dummy="zero"))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 `[T]` in `[0, vocab)` -> `[T, hidden]`."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < self.rows)
        rows = F.embedding(local.where(mine, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(~mine[:, None], 0.0))

    def embed_normed(self, ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(states), states)` for `states`, what `embed` returns."""
        if self.group.size == 1:
            return norm.embed(ids, self.weight)
        states = self.embed(ids)
        return norm(states), states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[S, hidden] -> [S, vocab]`, products summed and kept in float32 (float64 for
        float64 models)."""
        local = _wide_linear(hidden, self.weight)
        return self.group.all_gather(local, -1)[:, : self.vocab]


def _wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x weight^T` without rounding the result to a half-width dtype."""
    dtype = wide(x.dtype)
    if x.dtype == dtype:
        return F.linear(x, weight)
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=dtype)
    x = x.to(dtype)
    return torch.cat([F.linear(x, rows.to(dtype)) for rows in torch.split(weight, _HEAD_ROWS)], -1)
