"""A layer of routed experts, with or without shared ones."""

from __future__ import annotations

import torch
from torch import nn

from baton.config.model import MoEConfig
from baton.layers.mlp import MLP
from baton.layers.norm import RMSNorm
from baton.layers.weights import Fill, LayerContext, Source, Weighted, split_even
from baton.ops.dtypes import wide
from baton.ops.moe import expert_mlp, expert_mlp_norm
from baton.ops.router import gate, split_weight


class Router(Weighted):
    """Scores in float32 (float64 for float64 models), replicated on every rank.

    Checkpoint tensors: `gate.weight [E, H]` and, with `score_bias`,
    `gate.e_score_correction_bias [E]`.
    """

    def __init__(self, context: LayerContext, moe: MoEConfig, hidden: int) -> None:
        super().__init__()
        self.moe, dtype = moe, wide(context.dtype)
        experts = moe.num_experts
        self.weight: torch.Tensor
        self.declare("weight", (experts, hidden), dtype)
        all_rows = slice(None)
        weight = Source("gate.weight", (experts, hidden), (all_rows, all_rows))
        self.fills.append(Fill("weight", (all_rows, all_rows), (weight,)))
        self.bias: torch.Tensor | None
        self.register_parameter("bias", None)
        if moe.score_bias:
            self.declare("bias", (experts,), dtype)
            bias = Source("gate.e_score_correction_bias", (experts,), (all_rows,))
            self.fills.append(Fill("bias", (all_rows,), (bias,), dummy="zero"))
        #: the weight as the gate multiplies many tokens with it
        self._split: torch.Tensor | None = None

    def derive(self) -> None:
        """See Weighted."""
        self._split = split_weight(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H] -> (experts int64 [T, K + S], weights [T, K + S])`, shared experts behind."""
        return gate(x, self.weight, self.bias, self.moe, self._split)


class Experts(Weighted):
    """Every expert's gate, up and down weights, split over ranks by the intermediate width.

    Checkpoint tensors: one per expert (`experts.E.gate_proj.weight [I, H]`, ...), or stacked as
    transformers keeps them in memory (`experts.gate_up_proj [E, 2I, H]`,
    `experts.down_proj [E, H, I]`). S shared experts lie behind the E routed ones; the checkpoint
    has them as one MLP (`shared_experts.gate_proj.weight [S I, H]`, ...).
    """

    def __init__(self, context: LayerContext, moe: MoEConfig, hidden: int) -> None:
        super().__init__()
        self.wide_combine, self.common = moe.fp32_combine, moe.shared_experts
        count, width = moe.num_experts, moe.intermediate
        share = split_even(width, context.group, "the experts' intermediate size")
        self.gate_up: torch.Tensor
        self.down: torch.Tensor
        self.declare("gate_up", (count + self.common, 2 * share.size, hidden), context.dtype)
        self.declare("down", (count + self.common, hidden, share.size), context.dtype)
        every = slice(None)
        for e in range(count):
            for place, part in enumerate(("gate_proj", "up_proj")):
                rows = slice(place * width + share.start, place * width + share.stop)
                sources = (
                    Source(f"experts.{e}.{part}.weight", (width, hidden), (share.index, every)),
                    Source("experts.gate_up_proj", (count, 2 * width, hidden), (e, rows, every)),
                )
                into = slice(place * share.size, (place + 1) * share.size)
                self.fills.append(Fill("gate_up", (e, into, every), sources))
            sources = (
                Source(f"experts.{e}.down_proj.weight", (hidden, width), (every, share.index)),
                Source("experts.down_proj", (count, hidden, width), (e, every, share.index)),
            )
            self.fills.append(Fill("down", (e, every, every), sources))
        total = moe.shared_intermediate
        for s in range(self.common):
            part_of = slice(s * width + share.start, s * width + share.stop)
            for place, part in enumerate(("gate_proj", "up_proj")):
                into = slice(place * share.size, (place + 1) * share.size)
                name = f"shared_experts.{part}.weight"
                source = Source(name, (total, hidden), (part_of, every))
                self.fills.append(Fill("gate_up", (count + s, into, every), (source,)))
            name = "shared_experts.down_proj.weight"
            source = Source(name, (hidden, total), (every, part_of))
            self.fills.append(Fill("down", (count + s, every, every), (source,)))

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """This rank's share of the combined output, with `shared` added: `[T, H]`."""
        return expert_mlp(
            x, experts, weights, self.gate_up, self.down, self.wide_combine, shared, self.common
        )

    def add(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        residual: torch.Tensor,
        norm: RMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm.add(self(...), residual)`, in one kernel where there is one."""
        return expert_mlp_norm(
            x,
            experts,
            weights,
            self.gate_up,
            self.down,
            residual,
            norm.weight,
            norm.eps,
            self.wide_combine,
            shared,
            self.common,
        )


class MoE(nn.Module):
    """Router, routed experts, shared experts; one sum over ranks for all of it. A shared expert
    that is not made of whole experts is an MLP of its own."""

    def __init__(self, context: LayerContext, moe: MoEConfig, hidden: int) -> None:
        super().__init__()
        self.group = context.group
        self.gate = Router(context, moe, hidden)
        self.experts = Experts(context, moe, hidden)
        self.shared_experts = (
            MLP(context, hidden, moe.shared_intermediate, reduce=False)
            if moe.shared_intermediate and not moe.shared_experts
            else None
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H]`, twice -> `(norm(s), s)`, of s = residual + what the layer makes of x."""
        shared = None if self.shared_experts is None else self.shared_experts(x)
        experts, weights = self.gate(x)
        if self.group.size == 1:
            return self.experts.add(x, experts, weights, shared, residual, norm)
        y: torch.Tensor = self.experts(x, experts, weights, shared)
        return norm.add(self.group.all_reduce(y), residual)
