"""What start-up compiles is all that any step launches: no request waits for a compilation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import triton
from triton.runtime import driver

from baton.config.model import MoEConfig
from baton.core.kv import KVShape
from baton.kv.format import make_views
from baton.ops import activation, moe, norm, qkv, rope, router
from baton.ops.rope import Rotation
from baton.ops.triton import sample, step
from baton.ops.triton.decode_gqa import decode_gqa, gqa_launch
from baton.ops.triton.decode_mla import decode_mla, mla_launch
from baton.ops.triton.heads import head_products
from baton.ops.triton.split import Workspace, task_map
from baton.runner.graphs import PROMPT_BUCKETS, batch_buckets
from baton.runner.probes import chunks
from helpers.sm90 import Hopper

META = torch.device("meta")
MOST, BATCH, PAGE = 4500, 256, 64
HY3 = MoEConfig(192, 8, 1536, score="sigmoid", score_bias=True, shared_intermediate=1536)
MOONLIGHT = MoEConfig(64, 6, 1408, score="sigmoid", score_bias=True, shared_intermediate=2816)
QWEN3 = MoEConfig(128, 8, 768)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels that would be compiled, by name and what they are specialised on."""
    found: set[str] = set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = self.device_caches[0][4]
        _, specialisation, options = binder(*args, debug=False, **kwargs)
        found.add(f"{self.fn.__name__} {specialisation} {options}")

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(triton.JITFunction, "run", record)
    for module in (activation, moe, norm, qkv, rope, router):
        monkeypatch.setattr(module, "on_gpu", lambda *_: True)
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def covered(
    launched: set[str], step: Callable[[int], Any], known: Iterable[int], every: Iterable[int]
) -> None:
    for size in known:
        step(size)
    before = set(launched)
    for size in every:
        step(size)
        assert launched == before, f"first at {size}: {launched - before}"


def compiled_sizes() -> list[int]:
    return sorted({*chunks(MOST), *batch_buckets(BATCH)})


@pytest.mark.parametrize("config, hidden", [(HY3, 4096), (MOONLIGHT, 2048), (QWEN3, 2048)], ids=str)
def test_experts_at_every_number_of_tokens(
    launched: set[str], config: MoEConfig, hidden: int
) -> None:
    count = config.num_experts + config.shared_experts
    weight, bias = (empty(*s, dtype=torch.float32) for s in ((config.num_experts, hidden), (192,)))
    split = empty(3 * config.num_experts, hidden)
    gate_up = empty(count, 2 * config.intermediate, hidden)
    down, scale = empty(count, hidden, config.intermediate), empty(hidden)

    def step(tokens: int) -> None:
        x, _ = norm.add_rms_norm(empty(tokens, hidden), empty(tokens, hidden), scale, 1e-5)
        chosen = router.gate(x, weight, bias, config, split)
        parts, shared = (x, *chosen, gate_up, down), {"common": config.shared_experts}
        moe.expert_mlp(*parts, **shared)  # of a rank among several
        moe.expert_mlp_norm(*parts, empty(tokens, hidden), scale, 1e-5, **shared)
        activation.silu_mul(empty(tokens, 2 * 1024))

    covered(launched, step, compiled_sizes(), range(1, MOST + 1))


def test_heads_at_every_number_of_tokens(launched: set[str]) -> None:
    (pair,) = make_views([KVShape(8, 128, 128)], 9, PAGE, "bfloat16", torch.bfloat16, "meta")
    (latent,) = make_views([KVShape(1, 576, 512, True)], 9, PAGE, "bfloat16", torch.bfloat16, "meta")  # fmt: skip # noqa: E501
    norms, weight = (empty(128), empty(128)), empty(512)

    def step(tokens: int) -> None:
        slots = torch.empty(tokens, dtype=torch.int64, device=META)
        turn = (empty(tokens, side, dtype=torch.float32) for side in (64, 64, 32, 32))
        rotation = Rotation(next(turn), next(turn), False)
        qkv.gqa_heads(empty(tokens, 80 * 128), (64, 8), norms, 1e-5, rotation, pair, slots)
        rotation, both = Rotation(next(turn), next(turn), True), empty(tokens, 16 * 192 + 576)
        q, kv = both[:, :-576].view(tokens, 16, 192), both[:, -576:]
        qkv.mla_heads(q, kv, weight, 1e-6, rotation, latent, slots)

    covered(launched, step, compiled_sizes(), range(1, MOST + 1))


def test_decodes_at_every_batch(launched: set[str]) -> None:
    mla, gqa = mla_launch(16), gqa_launch(8, 128)
    spaces = [Workspace.make(264, c.rows, d, META) for c, d in ((mla, 512), (gqa, 128))]
    key, value = (empty(9, PAGE, 8, 128) for _ in "kv")
    latents, up = empty(9, PAGE, 1, 576), empty(16, 256, 512)

    def step(batch: int, picked: bool = True) -> None:
        positions = torch.empty(batch, dtype=torch.int64, device=META)
        pages = torch.empty(batch, 32, dtype=torch.int64, device=META)
        for rows in (None, positions) if picked else (None,):
            shares = task_map(positions, mla.tile, 1, 132, rows)
            q = empty(16, batch, 512).transpose(0, 1), empty(batch, 16, 192)[..., 128:]
            decode_mla(*q, latents, pages, shares, spaces[0], 0.1, mla)
            head_products(empty(batch, 16, 192)[..., :128], up[:, :128], True)
            head_products(empty(batch, 16, 512), up[:, 128:].transpose(1, 2), False)
            shares = task_map(positions, gqa.tile, 8, 132, rows)
            decode_gqa(empty(batch, 64, 128), key, value, pages, shares, spaces[1], 0.1, gqa)

    for size in batch_buckets(BATCH):
        step(size, picked=False)
    covered(launched, step, (), range(1, BATCH + 1))


@pytest.mark.parametrize("vocab", [120832, 163840, 50001])
def test_samples_at_every_number_of_rows(launched: set[str], vocab: int) -> None:
    heat = torch.ones(BATCH, 6, dtype=torch.float64)
    ints = torch.zeros(BATCH, 3, dtype=torch.int64)
    counts = torch.zeros(BATCH, dtype=torch.int64)

    def step(rows: int) -> None:
        logits = torch.empty(rows, vocab)
        slots = torch.arange(rows + 1)[1:]  # part of a larger tensor
        sample.choose(logits, slots, heat[:, 0], ints[:, 0], counts)

    covered(launched, step, (1,), range(1, BATCH + 1))


@pytest.mark.parametrize("hidden, half", [(4096, 64), (2048, 32), (2880, 32)])
def test_embedding_and_angles_at_every_number_of_tokens(
    launched: set[str], hidden: int, half: int
) -> None:
    table, weight = empty(1000, hidden), empty(hidden)
    frequencies = empty(half, dtype=torch.float32)

    def run(tokens: int, offset: int = 0) -> None:
        ids = torch.arange(tokens + offset)[offset:]  # part of a larger tensor
        norm.embed_rms_norm(ids, table, weight, 1e-5)
        rope.angles(ids, frequencies, 1.0)

    def every(tokens: int) -> None:
        run(tokens)
        run(tokens, 1)

    for size in compiled_sizes():
        run(size)
    covered(launched, every, (), range(1, MOST + 1))


@pytest.mark.parametrize("width", [64, 65, 8192])
def test_prompts_begin_alike_at_every_length(launched: set[str], width: int) -> None:
    computed = torch.zeros(BATCH + 1, dtype=torch.int64)
    pages = torch.zeros(BATCH + 1, width, dtype=torch.int64)
    head = torch.ones(2 + PROMPT_BUCKETS[-1], dtype=torch.int64)

    def run(size: int) -> None:
        step.prompt_inputs(head, size, computed, pages, PAGE)

    covered(launched, run, PROMPT_BUCKETS[:1], range(1, PROMPT_BUCKETS[-1] + 1))


@pytest.mark.parametrize("width", [1, 17, 512, 8192])
def test_decodes_begin_and_end_at_every_batch(launched: set[str], width: int) -> None:
    last, computed, generated = (torch.zeros(BATCH + 1, dtype=torch.int64) for _ in range(3))
    tables = torch.zeros(BATCH + 1, width, dtype=torch.int64)

    def run(rows: int, offset: int = 0) -> None:
        slots, live = torch.zeros(2, BATCH + offset, dtype=torch.int64)[:, offset:]
        slots, live = slots[:rows], live[:rows]
        step.decode_inputs(slots, last, computed, tables, PAGE)
        bad = torch.zeros(rows, dtype=torch.bool)
        step.advance(slots, live, live.clone(), bad, last, computed, generated)

    def every(rows: int) -> None:
        run(rows)
        run(rows, 1)

    for size in batch_buckets(BATCH):
        run(size)
    covered(launched, every, (), range(1, BATCH + 1))
