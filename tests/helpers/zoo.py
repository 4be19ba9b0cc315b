"""Small models of every family, random but with weights that matter, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
QWEN = LLAMA | {
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
HY3 = LLAMA | {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "num_hidden_layers": 3,
}
DEEPSEEK = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama 12 per KV head": (
        "Llama",
        LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 2, "hidden_size": 96},
    ),
    "llama head_dim 96": ("Llama", LLAMA | {"head_dim": 96, "num_attention_heads": 4}),
    "llama3 rope": ("Llama", LLAMA | {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", LLAMA | {"rope_parameters": YARN}),
    "llama linear": (
        "Llama",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen3 moe": ("Qwen3Moe", QWEN),
    "qwen3 moe some dense": (
        "Qwen3Moe",
        QWEN | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen3 moe unnormalised": ("Qwen3Moe", QWEN | {"norm_topk_prob": False}),
    "hy3": ("HYV3", HY3),
    "hy3 8 per KV head": ("HYV3", HY3 | {"num_attention_heads": 16, "num_key_value_heads": 2}),
    "hy3 yarn": ("HYV3", HY3 | {"rope_parameters": YARN}),
    "deepseek3": ("DeepseekV3", DEEPSEEK),
    "deepseek3 one group": ("DeepseekV3", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "deepseek3 no query latent": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1},
    ),
    "deepseek3 biases": ("DeepseekV3", DEEPSEEK | {"attention_bias": True}),
    "deepseek3 biases but on queries": (
        "DeepseekV3",
        DEEPSEEK | {"attention_bias": True, "q_lora_rank": None},
    ),
    "deepseek3 yarn": ("DeepseekV3", DEEPSEEK | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek3 half-split rope": ("DeepseekV3", DEEPSEEK | {"rope_interleave": False}),
    "deepseek2 greedy": (
        "DeepseekV2",
        DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
    ),
    "deepseek2 groups": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek2 yarn": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "greedy", "rope_parameters": DEEPSEEK_YARN},
    ),
}  # fmt: skip


def random_model(family: str, config: dict[str, Any], seed: int = 0) -> Any:
    """transformers' own model with weights that matter: sharp routers, real biases and norms."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**config, attn_implementation="eager")
    )
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        if "norm" in name:
            tensor.data.uniform_(0.5, 1.5)
        elif name.endswith("e_score_correction_bias"):
            tensor.data.normal_(0.0, 0.3)
        elif name.endswith("bias"):
            tensor.data.normal_(0.0, 0.1)
        else:
            tensor.data.normal_(0.0, 0.3 if "gate.weight" in name else 0.12)
    return made.eval()


TOKENS = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(3)).tolist()


def expected_logits(made: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return made(torch.tensor([tokens])).logits[0]
