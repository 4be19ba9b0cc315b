"""The gated MLP (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import nn

from baton.layers.linear import column, row
from baton.layers.weights import LayerContext, split_even
from baton.ops.activation import silu_mul


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, split over ranks by the intermediate width.

    With `reduce` off each rank returns its share of the sum.
    """

    def __init__(
        self,
        context: LayerContext,
        hidden: int,
        intermediate: int,
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        super().__init__()
        share = split_even(intermediate, context.group, "the MLP's intermediate size")
        self.gate_up_proj = column(
            context, hidden, {"gate_proj": share, "up_proj": share}, bias=bias
        )
        self.down_proj = row(context, "down_proj", share, hidden, bias=bias, reduce=reduce)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`."""
        y: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return y
