"""A model's shape in Baton's words, whatever its family calls things in `config.json`.

Each file in `models/` turns its family's `config.json` into a ModelConfig; everything outside
`models/` reads only this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. `dim` is the rotated width of a head; `scaling` keeps the family's own
    parameters (`factor`, `original_max_position_embeddings`, `beta_fast`, ...)."""

    dim: int
    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    interleaved: bool = False
    scaling: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention; `qk_norm` is an RMSNorm per head, applied before RoPE."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). `q_lora_rank` None: the query
    projection is one matrix."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts. `groups`/`top_groups`: node-limited routing (1/1 turns it off).

    `group_score`: how a group is scored, by its best expert ("max", DeepSeek-V2) or by the sum of
    its two best ("top2", DeepSeek-V3). `score_bias`: a per-expert bias decides the choice but not
    the weight. `shared_intermediate` 0 means no shared expert.
    """

    num_experts: int
    top_k: int
    intermediate: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_bias: bool = False
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    shared_intermediate: int = 0
    fp32_combine: bool = True

    @property
    def shared_experts(self) -> int:
        """How many experts of `intermediate` the shared one is made of: they lie behind the routed
        ones and every token visits them. 0 when it is not a whole number of them."""
        count, rest = divmod(self.shared_intermediate, self.intermediate)
        return 0 if rest else count


@dataclass(frozen=True)
class LocalConfig:
    """Layers of two kinds: those in `global_layers` see everything, without positions and with
    scores scaled by `log(length) / log(log_base)`; the others see blocks of `block` tokens, their
    own and the one before."""

    block: int
    global_layers: tuple[int, ...]
    log_base: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything the engine needs to know about a model. `moe_layers[i]` says whether layer i has
    routed experts. `num_mtp_layers` are in the checkpoint; the first is loaded with `mtp`. `raw` is
    config.json."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    attention: GQAConfig | MLAConfig
    rope: RopeConfig
    norm_eps: float
    max_position: int
    dtype: str = "bfloat16"
    mlp_bias: bool = False
    tie_embeddings: bool = False
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    num_mtp_layers: int = 0
    mtp: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    softmax_scale: float = 0.0
    local: LocalConfig | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
