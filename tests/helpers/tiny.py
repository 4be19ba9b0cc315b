"""Small random checkpoints of all families, written by transformers' own `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "hy_v3": (
        "HYV3Config",
        {
            "intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "router_scaling_factor": 2.0,
            "qk_norm": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.0,
            "norm_topk_prob": True,
        },
    ),
}


def save_tiny(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of `family` (a few layers, vocabulary of 320) and return it."""
    class_name, options = FAMILIES[family]
    config = getattr(transformers, class_name)(**(COMMON | options | overrides))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if "correction_bias" in name or "expert_bias" in name:
            tensor.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder
