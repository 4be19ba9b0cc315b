"""The module of a checkpoint that predicts one token further (arXiv 2412.19437, 2.2)."""

from __future__ import annotations

import re

import torch
from torch import nn

from baton.attention.backend import Attention, AttentionPlan
from baton.config.model import ModelConfig
from baton.core.kv import KVView
from baton.layers.linear import column
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext, whole
from baton.models.block import Block

_OWN = re.compile(r"^mtp\.(block\.)?")


class MTP(nn.Module):
    """`h'_t = norm(block(W [norm(e_{t+1}); norm(h_t)]))`, whose logits predict token t + 2.

    `h` is the model's final normed hidden state, `e` its embedding; the head is the model's, too.
    In a checkpoint the module is the layer behind the last one: `checkpoint_name`.
    """

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.enorm = RMSNorm(context, "enorm", hidden, eps)
        self.hnorm = RMSNorm(context, "hnorm", hidden, eps)
        self.eh_proj = column(context, 2 * hidden, {"eh_proj": whole(hidden)})
        self.block = Block(context, config, routed=config.moe is not None)
        self.norm = RMSNorm(context, "shared_head.norm", hidden, eps)

    def forward(
        self,
        hidden: torch.Tensor,
        following: torch.Tensor,
        attention: Attention,
        plan: AttentionPlan,
        view: KVView,
    ) -> torch.Tensor:
        """`hidden [T, H]`, `following [T, H]` embeddings of the tokens behind -> `[T, H]`."""
        x = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), -1))
        normed = self.block.input_layernorm(x)
        found: torch.Tensor = self.block(normed, x, attention, plan, view, self.norm)[0]
        return found


def checkpoint_name(name: str, layers: int) -> str:
    """What a checkpoint of `layers` layers calls the tensor `name` of a model."""
    return _OWN.sub(f"model.layers.{layers}.", name)
