"""Families by architecture: from `config.json` to a ModelConfig, from that to a model."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from baton.config.model import ModelConfig
from baton.core.errors import ModelError
from baton.core.forward import TensorGroup
from baton.layers.weights import LayerContext
from baton.models import deepseek_v3, hy_v3, llama, local_mla, qwen3_moe
from baton.models.decoder import CausalLM
from baton.ops.dtypes import torch_dtype

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen3_moe": qwen3_moe,
    "hy_v3": hy_v3,
    "deepseek_v3": deepseek_v3,
    "local_mla": local_mla,
}


def supported() -> list[str]:
    """Every architecture that can be served."""
    return sorted(name for family in FAMILIES.values() for name in family.ARCHITECTURES)


def parse(raw: dict[str, Any], path: str) -> ModelConfig:
    """`config.json` (as a dict, read from `path`) -> ModelConfig.

    Raises:
        ModelError: when the architecture is unknown (the message lists the known ones), or the
            family's reader finds a field missing, senseless or not supported.
    """
    architectures = raw.get("architectures") or []
    for family in FAMILIES.values():
        if any(name in family.ARCHITECTURES for name in architectures):
            return _checked(family, raw, path)
    if not architectures:
        for family in FAMILIES.values():
            if raw.get("model_type") in family.MODEL_TYPES:
                return _checked(family, raw, path)
    found = ", ".join(architectures) or f"model_type {raw.get('model_type')!r}"
    raise ModelError(
        file=path,
        problem=f"architecture {found} is not supported",
        expected=f"one of {', '.join(supported())}",
    )


def _checked(family: ModuleType, raw: dict[str, Any], path: str) -> ModelConfig:
    config: ModelConfig = family.parse(raw, path)
    try:
        torch_dtype(config.dtype)
    except ValueError as error:
        raise ModelError(file=path, problem=str(error)) from None
    return config


def build(
    config: ModelConfig,
    dtype: str | torch.dtype,
    device: str | torch.device,
    group: TensorGroup,
    attention_backend: str = "auto",
) -> CausalLM:
    """This rank's share of the model, without memory yet: `models.load` gives it weights.

    Args:
        config: from `parse`.
        dtype: of weights and activations.
        device: where weights will lie and the model will run.
        group: the ranks that share every layer.
        attention_backend: "auto", a name, or "prefill,decode".

    Raises:
        ConfigError: when the ranks do not divide the model, or no attention backend fits.
    """
    return CausalLM(
        config,
        LayerContext(torch_dtype(dtype), group),
        torch.device(device),
        attention_backend,
        FAMILIES[config.family].aliases,
    )
