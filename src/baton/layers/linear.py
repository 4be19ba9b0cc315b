"""Linear layers that carry their shard spec. Model text never says how they are split."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from baton.layers.weights import Fill, LayerContext, Source, Split, Weighted, whole
from baton.ops.linear import linear


class Linear(Weighted):
    """`y = x W^T + b`, one GEMM for several named checkpoint tensors stacked by output rows.

    Args:
        context: dtype and ranks.
        inputs: this rank's share of the input columns. A proper share makes the layer
            row-parallel: results are summed over ranks (unless `reduce` is off, for a caller
            that sums once for several layers).
        parts: output rows of each checkpoint tensor, this rank's share of each, in GEMM order.
        bias: whether `<part>.bias` exist, or which parts have one; the others' is zero.
        reduce: sum over ranks.

    Input `[..., inputs.size]`, output `[..., sum of the shares]`, in the context's dtype.
    """

    def __init__(
        self,
        context: LayerContext,
        inputs: Split,
        parts: Mapping[str, Split],
        bias: bool | Collection[str] = False,
        reduce: bool = True,
    ) -> None:
        super().__init__()
        assert reduce or not bias, "a bias needs the sum it is added to"
        self.group = context.group
        self.sharded_inputs = inputs.size < inputs.total
        self.reduce = self.sharded_inputs and reduce
        biased = bias if isinstance(bias, Collection) else parts if bias else ()
        rows = sum(part.size for part in parts.values())
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        self.declare("weight", (rows, inputs.size), context.dtype)
        self.register_parameter("bias", None)
        if biased:
            self.declare("bias", (rows,), context.dtype)
        row = 0
        for name, part in parts.items():
            into = slice(row, row + part.size)
            row += part.size
            shape = (part.total, inputs.total)
            weight = Source(f"{name}.weight", shape, (part.index, inputs.index))
            self.fills.append(Fill("weight", (into, slice(None)), (weight,)))
            if biased:
                source = Source(f"{name}.bias", (part.total,), (part.index,))
                self.fills.append(Fill("bias", (into,), (source,) if name in biased else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., inputs] -> [..., rows]`."""
        if not self.sharded_inputs:
            return linear(x, self.weight, self.bias)
        y = linear(x, self.weight)
        if self.reduce:
            y = self.group.all_reduce(y)
        # After the sum: every rank holds the whole bias, it must count once.
        return y if self.bias is None else y + self.bias


def column(
    context: LayerContext,
    inputs: int,
    parts: Mapping[str, Split],
    bias: bool | Collection[str] = False,
) -> Linear:
    """Whole inputs, each rank its own output rows (or all rows of a part that is whole)."""
    return Linear(context, whole(inputs), parts, bias)


def row(
    context: LayerContext,
    name: str,
    inputs: Split,
    outputs: int,
    bias: bool = False,
    reduce: bool = True,
) -> Linear:
    """Each rank its own inputs, whole outputs, summed over ranks."""
    return Linear(context, inputs, {name: whole(outputs)}, bias, reduce)
