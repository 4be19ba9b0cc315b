"""DeepSeek-V3's text with layers of two kinds: most see blocks of tokens, their own and the one
before, with rotary positions; a few see everything, without positions and with scores scaled by
length (the pattern of arXiv 2501.18795). What it recalls does not end where its training did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.config.model import LocalConfig, ModelConfig
from baton.models import deepseek_v3
from baton.models.fields import Fields

ARCHITECTURES = ("LocalMLAForCausalLM",)
MODEL_TYPES = ("local_mla",)

aliases = deepseek_v3.aliases


def parse(raw: dict[str, Any], path: str) -> ModelConfig:
    """`config.json` -> ModelConfig.

    Raises:
        ModelError: for a missing or senseless field, or a feature that is not supported.
    """
    config, fields = deepseek_v3.parse(raw, path), Fields(raw, path)
    layers = raw.get("global_layers")
    known = range(config.num_layers)
    if not isinstance(layers, list) or not all(type(i) is int and i in known for i in layers):
        raise fields.fail(f"global_layers {layers!r}", f"layers from 0 to {known[-1]}")
    base = fields.integer("score_log_base")
    if base < 2:
        raise fields.fail(f"score_log_base {base}", "at least 2")
    local = LocalConfig(fields.integer("attention_block"), tuple(layers), base)
    return replace(config, family="local_mla", local=local)
