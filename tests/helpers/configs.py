"""Small engine configurations for tests that need no model."""

from __future__ import annotations

from typing import Any

from baton.config.engine import EngineConfig
from baton.config.model import GQAConfig, ModelConfig, RopeConfig


def make_model(
    vocab_size: int = 97, eos: tuple[int, ...] = (0,), num_layers: int = 1
) -> ModelConfig:
    """The shape of a tiny dense model."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        num_layers=num_layers,
        intermediate_size=8,
        attention=GQAConfig(num_heads=1, num_kv_heads=1, head_dim=8),
        rope=RopeConfig(dim=8),
        norm_eps=1e-5,
        max_position=1 << 20,
        eos_token_ids=eos,
    )


def make_config(**changes: Any) -> EngineConfig:
    """An EngineConfig of test size with some fields changed."""
    values: dict[str, Any] = {
        "model_path": "test",
        "load_format": "dummy",
        "seed": 0,
        "model": make_model(),
        "dtype": "float32",
        "max_model_len": 1024,
        "page_size": 16,
        "kv_dtype": "float32",
        "num_pages": 64,
        "gpu_memory_utilization": 0.9,
        "prefix_caching": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_num_queued_reqs": 1024,
        "max_num_queued_tokens": 1 << 20,
        "step_time": 1.0,
        "step_memory": 1 << 40,
        "async_scheduling": True,
        "tensor_parallel_size": 1,
        "device": "cpu",
        "attention_backend": "auto",
        "enforce_eager": False,
        "threads": 1,
    }
    return EngineConfig(**(values | changes))
