"""DeepSeek-V3 (arXiv 2412.19437) and V2 (arXiv 2405.04434): MLA, then routed experts beside
shared ones. V2-Lite, Moonlight and Kimi-K2 are shapes of it.

    c = norm(W_a x)[:rank], k_R = rope(W_a x)[rank:]     kept in the cache
    k_h = (U_k,h c ; k_R),  v_h = U_v,h c                per head h
"""

from __future__ import annotations

from typing import Any, Literal

from baton.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from baton.models.fields import Fields
from baton.ops.rope import yarn_mscale

ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")

_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


def parse(raw: dict[str, Any], path: str) -> ModelConfig:
    """`config.json` of a DeepSeek-V2 or V3 -> ModelConfig.

    Raises:
        ModelError: for a missing or senseless field, or a feature that is not supported.
    """
    fields = Fields(raw, path)
    fields.refuse_unsupported()
    nope, rotated = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    rope = fields.rope(rotated, 10000.0, interleaved=fields.flag("rope_interleave", True))
    first, every = fields.count("first_k_dense_replace"), fields.integer("moe_layer_freq", 1)
    layers = range(fields.integer("num_hidden_layers"))
    return ModelConfig(
        family="deepseek_v3",
        attention=MLAConfig(
            num_heads=fields.integer("num_attention_heads"),
            q_lora_rank=fields.count("q_lora_rank") or None,
            kv_lora_rank=fields.integer("kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rotated,
            v_dim=fields.integer("v_head_dim"),
            bias=fields.flag("attention_bias"),
        ),
        rope=rope,
        moe=_moe(fields) if raw.get("n_routed_experts") else None,
        moe_layers=tuple(i >= first and i % every == 0 for i in layers),
        num_mtp_layers=fields.count("num_nextn_predict_layers"),
        softmax_scale=(nope + rotated) ** -0.5 * _mscale(rope) ** 2,
        **fields.common(),
    )


def _mscale(rope: RopeConfig) -> float:
    """YaRN's temperature on the scores; cos and sin carry only the rest of it."""
    all_dim = rope.scaling.get("mscale_all_dim", 0.0)
    return yarn_mscale(rope.scaling["factor"], all_dim) if all_dim else 1.0


def _moe(fields: Fields) -> MoEConfig:
    """V3 defaults to sigmoid scores with a bias, V2 to softmax scores without."""
    v2 = fields.raw.get("model_type") == "deepseek_v2"
    method = fields.raw.get("topk_method") or ("greedy" if v2 else "noaux_tc")
    if method not in _METHODS:
        raise fields.fail(f"topk_method {method!r} is not supported", f"one of {_METHODS}")
    default = "softmax" if v2 else "sigmoid"
    score: Literal["softmax", "sigmoid"]
    said = fields.raw.get("scoring_func") or default
    if said == "softmax":
        score = "softmax"
    elif said == "sigmoid":
        score = "sigmoid"
    else:
        raise fields.fail(f"scoring_func {said!r} is not supported", "softmax or sigmoid")
    grouped = method != "greedy"
    experts, groups = (
        fields.integer("n_routed_experts"),
        fields.integer("n_group", 1) if grouped else 1,
    )
    if experts % groups:
        raise fields.fail(f"n_group {groups} does not divide {experts} experts", "a divisor")
    intermediate = fields.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok"),
        intermediate=intermediate,
        score=score,
        score_bias=method == "noaux_tc",
        normalise=fields.flag("norm_topk_prob", not v2),
        scale=fields.number("routed_scaling_factor", 1.0 if v2 else 2.5),
        groups=groups,
        top_groups=fields.integer("topk_group", 1) if grouped else 1,
        group_score="top2" if method == "noaux_tc" else "max",
        shared_intermediate=intermediate * fields.count("n_shared_experts"),
    )


def aliases(name: str) -> tuple[str, ...]:
    """Other names of a checkpoint tensor: none."""
    return ()
