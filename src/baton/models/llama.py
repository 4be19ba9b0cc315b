"""Llama (arXiv 2302.13971, 2407.21783): RMSNorm, RoPE, GQA, SwiGLU. SmolLM2 is one.

h = x + o . attend(rope(q n1(x)), rope(k n1(x)), v n1(x))
y = h + down . (silu(gate n2(h)) * up n2(h))
"""

from __future__ import annotations

from typing import Any

from baton.config.model import GQAConfig, ModelConfig
from baton.models.fields import Fields

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)


def parse(raw: dict[str, Any], path: str) -> ModelConfig:
    """`config.json` of a Llama -> ModelConfig.

    Raises:
        ModelError: for a missing or senseless field, or a feature that is not supported.
    """
    fields = Fields(raw, path)
    fields.refuse_unsupported()
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    return ModelConfig(
        family="llama",
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=dim,
            bias=fields.flag("attention_bias"),
        ),
        rope=fields.rope(dim, theta=10000.0),
        mlp_bias=fields.flag("mlp_bias"),
        softmax_scale=dim**-0.5,
        **fields.common(),
    )


def aliases(name: str) -> tuple[str, ...]:
    """Other names of a checkpoint tensor: none."""
    return ()
