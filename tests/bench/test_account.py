"""The account against the project's own limits, the real models' shapes, and first principles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from baton.bench.offline.account import (
    H200,
    Bytes,
    Hardware,
    Parameters,
    decode,
    expected_experts,
    prefill,
)
from baton.layers.moe import Router
from baton.layers.norm import RMSNorm
from baton.models import registry
from baton.parallel.group import ShapeGroup
from helpers.shapes import BENCHED, TINY

TARGETS = Path(__file__).parents[2] / "benchmarks" / "targets.json"
#: FP8 weights and KV with the head in BF16; FP8 ceilings of the same card
FP8 = Bytes(weight=1.0, head=2.0, kv=1.0), Hardware("H200 in FP8", 4.25, 1283.0, 940.0)
VARIANTS = {"bf16": (Bytes(), H200), "fp8": FP8}


def limits() -> list[tuple[str, str, str, float]]:
    """(model, variant, point, limit in ms) of every target row with a limit."""
    return [
        (table["model"], table["variant"], point, limit)
        for table in json.loads(TARGETS.read_text())
        for point, limit in zip(table["points"], table["limit"], strict=True)
        if limit is not None
    ]


def test_every_limit_is_covered() -> None:
    assert len(limits()) == 34


@pytest.mark.parametrize("model, variant, point, limit", limits())
def test_limits_of_the_targets(model: str, variant: str, point: str, limit: float) -> None:
    config = registry.parse(BENCHED[model], model)
    sizes, card = VARIANTS[variant]
    kind, _, shape = point.partition(" ")
    if kind == "ttft":
        work = prefill(config, int(shape), sizes)
    else:
        batch, context = map(int, shape.split("x"))
        work = decode(config, batch, context, sizes)
    assert work.limit(card) * 1e3 == pytest.approx(limit, rel=0.15)


@pytest.mark.parametrize("raw", [*TINY.values(), *BENCHED.values()])
def test_parameters_are_those_of_the_model(raw: dict[str, object]) -> None:
    """All experts together: every matrix that the loader would fill, the embedding apart."""
    config = registry.parse(raw, "test")
    model = registry.build(config, "bfloat16", "cpu", ShapeGroup(1))
    counted = Parameters.of(config)
    small = sum(
        p.numel()
        for module in model.modules()
        if isinstance(module, RMSNorm)
        for p in module.parameters(recurse=False)
    )
    small += sum(m.bias.numel() for m in model.modules() if isinstance(m, Router))  # type: ignore[union-attr]
    assert config.moe is not None
    ours = counted.active(config.moe.num_experts) + 2 * counted.head + small
    assert ours == sum(p.numel() for p in model.parameters())


def test_expected_experts_is_the_mean_of_random_routing() -> None:
    assert expected_experts(64, 6, 0) == 0.0
    assert expected_experts(64, 6, 1) == pytest.approx(6.0)
    assert expected_experts(8, 8, 3) == 8.0
    torch.manual_seed(0)
    drawn = [torch.rand(16, 64).topk(6).indices.unique().numel() for _ in range(400)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_experts(64, 6, 16), rel=0.01)


def test_counted_experts_replace_expected_ones() -> None:
    config = registry.parse(TINY["gqa"], "test")
    few, many = (decode(config, 16, 100, Bytes(), experts=n) for n in (2.0, 8.0))
    each = Parameters.of(config).expert * 2.0
    assert many.weight_bytes - few.weight_bytes == 6 * each * Parameters.of(config).moe_layers
    assert (many.gemm_flops, many.kv_bytes) == (few.gemm_flops, few.kv_bytes)


def test_dense_models_have_no_experts() -> None:
    config = dataclasses.replace(registry.parse(TINY["gqa"], "test"), moe=None, moe_layers=())
    work = decode(config, 4, 100, Bytes.of("float32", "bfloat16"))
    counted = Parameters.of(config)
    assert work.experts == counted.expert == counted.moe_layers == 0
    numbers = counted.always + counted.head + 4 * config.hidden_size
    assert work.weight_bytes == 4 * numbers
    assert work.kv_bytes == 2 * 4 * 101 * config.num_layers * 2 * 2 * 16


def test_attention_by_hand() -> None:
    """Three tokens are six causal pairs; MLA pairs cost more absorbed and keep one latent."""
    gqa, mla = (registry.parse(TINY[name], "test") for name in ("gqa", "mla"))
    assert prefill(gqa, 3, Bytes()).attention_flops == 2 * 6 * 4 * 8 * 16
    assert prefill(mla, 3, Bytes()).attention_flops == 3 * 6 * 2 * 4 * (16 + 8 + 16)
    assert decode(mla, 2, 9, Bytes()).attention_flops == 3 * 2 * 10 * 2 * 4 * (32 + 8 + 32)
    assert decode(mla, 2, 9, Bytes()).kv_bytes == 3 * 2 * 10 * (32 + 8) * 2


def test_the_limit_is_the_slower_of_memory_and_arithmetic() -> None:
    config = registry.parse(TINY["gqa"], "test")
    work = prefill(config, 100, Bytes())
    slow_memory = Hardware("a", copy=1e-6, matmul=1.0, attention=1.0)
    slow_attention = Hardware("b", copy=1.0, matmul=1.0, attention=1e-6)
    assert work.limit(slow_memory) == (work.weight_bytes + work.kv_bytes) / 1e6
    assert work.limit(slow_attention) == pytest.approx(work.attention_flops / 1e6, rel=1e-3)
    assert work.limit(slow_memory.times(4)) == work.limit(slow_memory) / 4
