"""Qwen3-MoE (arXiv 2505.09388): Llama's block with q/k norms per head before RoPE, and softmax
routing over experts without a shared one.
"""

from __future__ import annotations

from typing import Any

from baton.config.model import GQAConfig, ModelConfig, MoEConfig
from baton.models.fields import Fields

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)


def parse(raw: dict[str, Any], path: str) -> ModelConfig:
    """`config.json` of a Qwen3-MoE -> ModelConfig.

    Raises:
        ModelError: for a missing or senseless field, or a feature that is not supported.
    """
    fields = Fields(raw, path)
    fields.refuse_unsupported()
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    step, dense = fields.integer("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    layers = range(fields.integer("num_hidden_layers"))
    return ModelConfig(
        family="qwen3_moe",
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=dim,
            qk_norm=True,
            bias=fields.flag("attention_bias"),
        ),
        rope=fields.rope(dim, theta=10000.0),
        moe=MoEConfig(
            num_experts=fields.integer("num_experts", raw.get("num_local_experts")),
            top_k=fields.integer("num_experts_per_tok"),
            intermediate=fields.integer("moe_intermediate_size"),
            score="softmax",
            normalise=fields.flag("norm_topk_prob"),
        ),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        softmax_scale=dim**-0.5,
        **fields.common(),
    )


def aliases(name: str) -> tuple[str, ...]:
    """Other names of a checkpoint tensor: none."""
    return ()
