"""The reference models as they are trained: DeepSeek-V3's text (arXiv 2412.19437) at a small size.

MLA, routed experts chosen by sigmoid scores with a balancing bias, one shared expert, one MTP
module. Layers see the whole context with rotary positions or, where the shape has a window, only
blocks of `window` tokens with rotary positions (their own block and the one before) and, in its
global layers, everything without positions and with length-scaled scores (SSMax, arXiv 2501.19399;
the layer pattern of arXiv 2501.18795).

Tokens are flat, `[N, hidden]` with `N = batch * length` always the same, so that `enter` and
`leave` compile once whatever the length; only attention sees sequences. All experts run on all
tokens: at this width that is two plain products, faster than sorting tokens by expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from training.attention import attend


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. `window` 0: every layer is global and rotated. `log_base`: the length at
    which the scores of unrotated layers are not scaled."""

    vocab: int = 448
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    nope: int = 32
    rope: int = 32
    value: int = 64
    latent: int = 128
    dense: int = 768
    experts: int = 16
    expert: int = 64
    top_k: int = 4
    theta: float = 1e6
    eps: float = 1e-6
    window: int = 0
    global_layers: tuple[int, ...] = ()
    log_base: int = 1024

    def is_global(self, layer: int) -> bool:
        """Whether the layer sees the whole context; the MTP module's index is `layers`."""
        return not self.window or layer in self.global_layers


@dataclass
class Positions:
    """What a batch's positions mean: `cos`, `sin` `[N, rope / 2]`, and the factor on the scores
    of unrotated layers, `[N, 1, 1]`."""

    cos: torch.Tensor
    sin: torch.Tensor
    scale: torch.Tensor


def positions(shape: Shape, batch: int, length: int, device: torch.device) -> Positions:
    """Of `batch` sequences of `length` tokens, one after another."""
    place = torch.arange(length, device=device, dtype=torch.float32)
    power = torch.arange(0, shape.rope, 2, device=device, dtype=torch.float32) / shape.rope
    angle = (place[:, None] * shape.theta**-power).repeat(batch, 1)
    scale = (place + 2).log().div(math.log(shape.log_base)).repeat(batch)[:, None, None]
    return Positions(angle.cos(), angle.sin(), scale)


class Linear(nn.Module):
    """`x W^T`, with float32 weights used in x's dtype."""

    def __init__(self, inner: int, outer: int, zero: bool = False) -> None:
        super().__init__()
        weight = torch.zeros(outer, inner)
        self.weight = nn.Parameter(weight if zero else weight.normal_(0, inner**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of `x [N, heads, rope]`."""
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.flatten(-2).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU; returns no expert counts."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, inner), Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden, zero=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), None


class MoE(nn.Module):
    """Routed experts and, behind them with weight 1, the shared one; `[E + 1, ...]` weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        count, hidden, inner = shape.experts + 1, shape.hidden, shape.expert
        self.router = nn.Parameter(torch.empty(shape.experts, hidden).normal_(0, hidden**-0.5))
        self.register_buffer("bias", torch.zeros(shape.experts))
        self.gate = nn.Parameter(torch.empty(count, inner, hidden).normal_(0, hidden**-0.5))
        self.up = nn.Parameter(torch.empty(count, inner, hidden).normal_(0, hidden**-0.5))
        self.down = nn.Parameter(torch.zeros(count, hidden, inner))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, and how many tokens chose each expert."""
        scores = F.linear(x.float(), self.router).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1, sorted=False).indices
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
        weight = torch.zeros_like(scores).scatter(-1, chosen, picked)
        weight = F.pad(weight, (0, 1), value=1.0).to(x.dtype)
        gate = F.linear(x, self.gate.flatten(0, 1).to(x.dtype))
        up = F.linear(x, self.up.flatten(0, 1).to(x.dtype))
        inner = (F.silu(gate) * up).unflatten(-1, (len(self.gate), -1)) * weight[..., None]
        down = self.down.permute(1, 0, 2).flatten(1).to(x.dtype)
        return F.linear(inner.flatten(1), down), (weight[:, :-1] > 0).float().sum(0)


class Block(nn.Module):
    """A pre-norm block in two halves, before attention and after it."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.everything = shape, shape.is_global(layer)
        self.rotated = not (shape.window and self.everything)
        hidden, heads = shape.hidden, shape.heads
        self.input_layernorm = Norm(hidden, shape.eps)
        self.q_proj = Linear(hidden, heads * (shape.nope + shape.rope))
        self.kv_a_proj_with_mqa = Linear(hidden, shape.latent + shape.rope)
        self.kv_a_layernorm = Norm(shape.latent, 1e-6)
        self.kv_b_proj = Linear(shape.latent, heads * (shape.nope + shape.value))
        self.o_proj = Linear(heads * shape.value, hidden, zero=True)
        self.post_attention_layernorm = Norm(hidden, shape.eps)
        self.mlp: MLP | MoE = MLP(hidden, shape.dense) if layer == 0 else MoE(shape)
        self.fused = (self.enter, self.leave)

    def enter(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys `[N, heads, nope + rope]`, values `[N, heads, value]`."""
        shape = self.shape
        x = self.input_layernorm(x)
        q = self.q_proj(x).unflatten(-1, (shape.heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split((shape.latent, shape.rope), -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (shape.heads, -1))
        k, v = both.split((shape.nope, shape.value), -1)
        shared = shared[:, None]
        if self.rotated:
            own, turned = q.split((shape.nope, shape.rope), -1)
            q = torch.cat((own, rotate(turned, cos, sin)), -1)
            shared = rotate(shared, cos, sin)
        else:
            q = (q * scale).to(q.dtype)
        return q, torch.cat((k, shared.expand(-1, shape.heads, -1)), -1), v.contiguous()

    def leave(
        self, x: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block's output and its expert counts."""
        x = x + self.o_proj(attended.flatten(1))
        y, counts = self.mlp(self.post_attention_layernorm(x))
        return x + y, counts

    def forward(
        self, x: torch.Tensor, place: Positions, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`x [N, hidden]` of `batch` sequences."""
        enter, leave = self.fused if torch.is_grad_enabled() else (self.enter, self.leave)
        q, k, v = enter(x, place.cos, place.sin, place.scale)
        window = 0 if self.everything else self.shape.window
        return leave(x, attend(q, k, v, batch, window))

    def fuse(self) -> None:
        """Fuse what surrounds attention; checks, which come in other sizes, stay eager."""
        self.fused = tuple(torch.compile(half, dynamic=False) for half in self.fused)


class MTP(nn.Module):
    """Predicts the token after the next from the last hidden state and the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.enorm, self.hnorm = Norm(hidden, shape.eps), Norm(hidden, shape.eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.block = Block(shape, shape.layers)
        self.norm = Norm(hidden, shape.eps)

    def forward(
        self, hidden: torch.Tensor, following: torch.Tensor, place: Positions, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normed hidden states `[N, hidden]` and embeddings of the tokens behind them."""
        x = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), -1))
        x, counts = self.block(x, place, batch)
        return self.norm(x), counts


class Model(nn.Module):
    """Embedding, blocks, norm, head, and the MTP module beside them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.hidden).normal_(0, 0.5))
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.head = Linear(shape.hidden, shape.vocab, zero=True)
        self.mtp = MTP(shape)

    def forward(
        self, tokens: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Token ids `[B, L]` -> normed hidden states of the model and of its MTP module, both
        `[B L, hidden]`, and each MoE layer's expert counts. The module's last position of every
        sequence, which has no next token, means nothing."""
        batch, length = tokens.shape
        place = positions(self.shape, batch, length, tokens.device)
        x = F.embedding(tokens.flatten(), self.embed).to(dtype)
        following = F.embedding(tokens.roll(-1, 1).flatten(), self.embed).to(dtype)
        counts = []
        for block in self.blocks:
            x, count = block(x, place, batch)
            counts += [] if count is None else [count]
        hidden = self.norm(x)
        ahead, count = self.mtp(hidden, following, place, batch)
        counts += [] if count is None else [count]
        return hidden, ahead, counts

    def routed(self) -> list[MoE]:
        """The MoE layers in the order of `forward`'s counts."""
        layers = [block.mlp for block in [*self.blocks, self.mtp.block]]
        return [layer for layer in layers if isinstance(layer, MoE)]

    @torch.no_grad()
    def balance(self, counts: list[torch.Tensor], rate: float) -> None:
        """Move every expert's bias a step towards an even load (arXiv 2408.15664)."""
        for layer, count in zip(self.routed(), counts, strict=True):
            layer.bias += rate * (count.mean() - count).sign()

    def fuse(self) -> None:
        """See Block; one compilation serves all blocks of a kind."""
        for block in [*self.blocks, self.mtp.block]:
            block.fuse()
