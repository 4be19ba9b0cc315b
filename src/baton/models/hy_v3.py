"""Hy3 (Hunyuan 3): GQA with q/k norms per head before RoPE, one dense layer, then layers of
sigmoid-routed experts chosen with a load-balancing bias, beside one shared expert.

    s = sigmoid(W_r x)              in float32
    pick the top k of s + bias;     weights = s / (sum s + 1e-20) * router_scaling_factor
    y = sum of picked experts + shared expert, added in float32
"""

from __future__ import annotations

from typing import Any

from baton.config.model import GQAConfig, ModelConfig, MoEConfig
from baton.models.fields import Fields

ARCHITECTURES = ("HYV3ForCausalLM",)
MODEL_TYPES = ("hy_v3",)


def parse(raw: dict[str, Any], path: str) -> ModelConfig:
    """`config.json` of a Hy3 -> ModelConfig.

    Raises:
        ModelError: for a missing or senseless field, or a feature that is not supported.
    """
    fields = Fields(raw, path)
    fields.refuse_unsupported()
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", 128)
    intermediate = fields.integer("moe_intermediate_size")
    return ModelConfig(
        family="hy_v3",
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=dim,
            qk_norm=fields.flag("qk_norm", True),
            bias=fields.flag("attention_bias"),
        ),
        rope=fields.rope(dim, theta=11_158_840.0),
        mlp_bias=fields.flag("mlp_bias"),
        moe=MoEConfig(
            num_experts=fields.integer("num_experts", raw.get("num_local_experts")),
            top_k=fields.integer("num_experts_per_tok"),
            intermediate=intermediate,
            score="sigmoid",
            score_bias=True,
            normalise=True,
            scale=fields.number("router_scaling_factor", 2.826),
            shared_intermediate=intermediate * fields.count("num_shared_experts", 1),
            fp32_combine=fields.flag("enable_moe_fp32_combine", True),
        ),
        moe_layers=_moe_layers(fields),
        num_mtp_layers=fields.count("num_nextn_predict_layers"),
        softmax_scale=dim**-0.5,
        **fields.common(),
    )


def _moe_layers(fields: Fields) -> tuple[bool, ...]:
    """From `mlp_layer_types` (transformers) or `first_k_dense_replace` (released config)."""
    layers = fields.integer("num_hidden_layers")
    types = fields.raw.get("mlp_layer_types")
    if types is None:
        return tuple(i >= fields.count("first_k_dense_replace", 1) for i in range(layers))
    if len(types) < layers:
        raise fields.fail(f"mlp_layer_types has {len(types)} entries", f"{layers}")
    return tuple(kind == "sparse" for kind in types[:layers])


def aliases(name: str) -> tuple[str, ...]:
    """The released ("inner") names, and transformers' in-memory ("outer") place of the bias."""
    if name.endswith("mlp.gate.weight"):
        return (name.replace("mlp.gate.", "mlp.router.gate."),)
    if name.endswith("mlp.gate.e_score_correction_bias"):
        layer = name.removesuffix("gate.e_score_correction_bias")
        return layer + "expert_bias", layer + "e_score_correction_bias"
    if ".mlp.shared_experts." in name:
        return (name.replace(".shared_experts.", ".shared_mlp."),)
    return ()
