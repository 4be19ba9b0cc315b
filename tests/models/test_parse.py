"""config.json of every family, old style and new, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config.model import GQAConfig, MLAConfig
from baton.core.errors import ModelError
from baton.models.registry import parse
from baton.ops.rope import attention_scaling

LLAMA: dict[str, Any] = dict(  # noqa: C408
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=49152, hidden_size=576,
    intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000, rope_scaling=None,
    tie_word_embeddings=True, torch_dtype="bfloat16", eos_token_id=2, bos_token_id=1,
    hidden_act="silu",
)  # fmt: skip
MOONLIGHT: dict[str, Any] = dict(  # noqa: C408
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=163840,
    hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408, num_hidden_layers=27,
    num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2, n_routed_experts=64,
    routed_scaling_factor=2.446, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
    v_head_dim=128, qk_nope_head_dim=128, n_group=1, topk_group=1, num_experts_per_tok=6,
    first_k_dense_replace=1, norm_topk_prob=True, scoring_func="sigmoid",
    topk_method="noaux_tc", hidden_act="silu", max_position_embeddings=1048576,
    rms_norm_eps=1e-5, rope_theta=50000.0, tie_word_embeddings=False, attention_bias=False,
    num_nextn_predict_layers=0, moe_layer_freq=1, torch_dtype="bfloat16", eos_token_id=163585,
)  # fmt: skip
V2_LITE = MOONLIGHT | dict(  # noqa: C408
    architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", scoring_func="softmax",
    topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0, rope_theta=10000,
    max_position_embeddings=163840,
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                  "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
)  # fmt: skip
HY3: dict[str, Any] = dict(  # noqa: C408
    architectures=["HYV3ForCausalLM"], model_type="hy_v3", vocab_size=120832, hidden_size=4096,
    intermediate_size=13312, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    head_dim=128, num_experts=192, num_experts_per_tok=8, num_shared_experts=1,
    moe_intermediate_size=1536, router_scaling_factor=2.826, qk_norm=True, hidden_act="silu",
    max_position_embeddings=262144, rms_norm_eps=1e-5, num_nextn_predict_layers=1,
    first_k_dense_replace=1, dtype="bfloat16", eos_token_id=[120025, 120026],
    rope_parameters={"rope_type": "default", "rope_theta": 11158840.0},
)  # fmt: skip


def test_llama_old_style() -> None:
    config = parse(LLAMA, "config.json")
    assert config.attention == GQAConfig(9, 3, 64)
    assert (config.rope.theta, config.rope.dim, config.rope.kind) == (100000.0, 64, "default")
    assert config.tie_embeddings
    assert config.eos_token_ids == (2,)


def test_hy3() -> None:
    config = parse(HY3, "config.json")
    assert config.attention == GQAConfig(64, 8, 128, qk_norm=True)
    assert config.rope.theta == 11158840.0
    assert config.moe_layers == (False,) + (True,) * 79
    assert config.num_mtp_layers == 1
    assert config.eos_token_ids == (120025, 120026)
    assert config.moe is not None
    assert (config.moe.scale, config.moe.shared_intermediate) == (2.826, 1536)


def test_hy3_without_optional_fields() -> None:
    optional = ("first_k_dense_replace", "num_nextn_predict_layers", "num_shared_experts")
    config = parse({k: v for k, v in HY3.items() if k not in optional}, "config.json")
    assert config.moe_layers == (False,) + (True,) * 79
    assert config.num_mtp_layers == 0
    assert config.moe is not None
    assert config.moe.shared_intermediate == 1536


def test_a_count_of_zero_is_not_the_default() -> None:
    config = parse(HY3 | {"first_k_dense_replace": 0, "num_shared_experts": 0}, "config.json")
    assert config.moe_layers == (True,) * 80
    assert config.moe is not None
    assert config.moe.shared_intermediate == 0


def test_moonlight() -> None:
    config = parse(MOONLIGHT, "config.json")
    assert config.attention == MLAConfig(16, None, 512, 128, 64, 128)
    assert config.rope.interleaved
    assert config.moe is not None
    assert (config.moe.score, config.moe.score_bias, config.moe.groups) == ("sigmoid", True, 1)
    assert config.moe.shared_intermediate == 2816
    assert config.softmax_scale == pytest.approx(192**-0.5)


def test_v2_lite_carries_yarn_temperature_in_the_softmax_scale() -> None:
    config = parse(V2_LITE, "config.json")
    assert config.moe is not None
    assert (config.moe.score, config.moe.score_bias, config.moe.normalise) == (
        "softmax",
        False,
        False,
    )
    assert config.softmax_scale == pytest.approx(
        0.1147213867929261
    )  # 192^-0.5 (0.0707 ln 40 + 1)^2
    assert attention_scaling(config.rope) == 1.0


def test_every_other_layer_has_experts_when_the_frequency_says_so() -> None:
    config = parse(MOONLIGHT | {"moe_layer_freq": 2}, "config.json")
    assert config.moe_layers[:5] == (False, False, True, False, True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*HYV3For"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' is -1"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "without 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "int8"}, "int8"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{message}"):
        parse(LLAMA | change, "config.json")


def test_model_type_decides_when_there_are_no_architectures() -> None:
    assert parse(LLAMA | {"architectures": None}, "config.json").family == "llama"
