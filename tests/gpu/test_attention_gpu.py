"""Every attention backend of this card against the reference backend in float32, on the card."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from baton.attention import packed
from baton.attention.backend import ATTENTION, Attention, make_attention
from baton.attention.positions.rotary import RotaryPositions
from baton.attention.spec import AttentionNeed, AttentionSpec, GQASpec, MLASpec
from baton.config.model import RopeConfig
from baton.core.forward import ForwardBatch
from baton.kv.format import make_views
from baton.ops.triton import decode_mla_hopper
from baton.ops.triton.common import overlapping

CUDA, BF16, PAGE = torch.device("cuda"), torch.bfloat16, 64
SPECS: dict[str, AttentionSpec] = {
    "gqa 64/8": GQASpec(64, 8, 128, 128**-0.5),
    "gqa 12/1": GQASpec(12, 1, 128, 128**-0.5),
    "gqa 9/3 d64": GQASpec(9, 3, 64, 64**-0.5),
    "mla 16": MLASpec(16, 512, 128, 64, 128, 192**-0.5),
    "mla 64": MLASpec(64, 512, 128, 64, 128, 192**-0.5),
}
#: (context, new tokens) of each sequence.
STEPS = {
    "one prompt": [(0, 1500)],
    "prompts": [(0, 2), (0, 700), (0, 65)],
    "chunk": [(3000, 1200)],
    "tails": [(130, 2), (64, 17), (0, 33), (4097, 64)],
    "mixed": [(700, 1), (0, 300), (63, 1), (64, 1), (900, 40)],
    "decode": [(0, 1), (63, 1), (64, 1), (5000, 1), (127, 1), (300, 1)],
    "skew": [(60000, 1)] + [(100 + 7 * i, 1) for i in range(40)],
}


class Case:
    """One step on shuffled pages that are NaN where nothing is stored, with its float32 twin."""

    def __init__(self, spec: AttentionSpec, rows: list[tuple[int, int]]) -> None:
        torch.manual_seed(len(rows))
        counts = [-(-(a + b) // PAGE) for a, b in rows]
        order = list(range(1, sum(counts) + 1))
        random.Random(1).shuffle(order)
        table = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for i, count in enumerate(counts):
            table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([n for _, n in rows]))
        at = torch.cat([torch.arange(a, a + b) for a, b in rows])
        self.batch = ForwardBatch(
            [b for _, b in rows],
            [a for a, _ in rows],
            at.to(CUDA),
            self.slots(table, owner, at),
            table.to(CUDA),
        )
        old = torch.cat([torch.arange(a) for a, _ in rows])
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([n for n, _ in rows]))
        slots, shape = self.slots(table, owner, old), spec.kv_shape
        self.views = [
            make_views([shape], sum(counts) + 1, PAGE, d, d, CUDA)[0]
            for d in ("bfloat16", "float32")
        ]
        past = self.random(len(old), shape.heads, shape.key_dim)
        past_v = None if shape.shared_value else self.random(len(old), shape.heads, shape.key_dim)
        for view in self.views:
            view.poison(torch.arange(sum(counts) + 1, device=CUDA))
            view.store(slots, past, past_v)
        new = len(at)
        if isinstance(spec, MLASpec):
            up = self.random(spec.num_heads, spec.nope_dim + spec.value_dim, spec.latent_dim)
            self.args = (
                self.random(new, spec.num_heads, spec.nope_dim + spec.rope_dim),
                self.random(new, spec.latent_dim + spec.rope_dim),
                (up / spec.latent_dim**0.5).to(BF16),
            )
        else:
            keys = self.random(new, 2 * spec.num_kv_heads, spec.head_dim)
            self.args = (self.random(new, spec.num_heads, spec.head_dim), *keys.chunk(2, 1))

    @staticmethod
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA).to(BF16)

    @staticmethod
    def slots(table: torch.Tensor, owner: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return (table[owner, at // PAGE] * PAGE + at % PAGE).to(CUDA)

    def run(self, attention: Attention, wide: bool = False) -> torch.Tensor:
        args = [x.float() for x in self.args] if wide else self.args
        plan = attention.plan(self.batch, PAGE)
        kind = attention.gqa if isinstance(attention.decode.need.spec, GQASpec) else attention.mla
        return kind(plan, self.views[wide], *args)


def make(name: str, spec: AttentionSpec, dtype: torch.dtype = BF16) -> Attention:
    positions = RotaryPositions(RopeConfig(64), dtype, CUDA)
    return make_attention(name, AttentionNeed(spec, dtype, CUDA), positions)


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each decode of latents that follows, whether it went to the Gluon kernel."""
    answers: list[bool] = []
    supports, launch = decode_mla_hopper.supports, decode_mla_hopper.launch

    def asked(*args: Any) -> bool:
        answers.append(False)
        return supports(*args)

    def launched(*args: Any) -> None:
        answers[-1] = True
        launch(*args)

    monkeypatch.setattr(decode_mla_hopper, "supports", asked)
    monkeypatch.setattr(decode_mla_hopper, "launch", launched)
    return answers


def meant_for_gluon(spec: AttentionSpec) -> bool:
    """What `decode_mla_hopper` was written for, on a card that can run it."""
    return overlapping() and isinstance(spec, MLASpec) and spec.num_heads <= decode_mla_hopper.ROWS


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("prefill", ["fa4", "fa3", "sdpa"])
@torch.inference_mode()
def test_backends(
    prefill: str,
    spec: str,
    step: str,
    small: bool,
    gluon: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`small`: so little workspace that a context comes in several blocks."""
    if step in ("decode", "skew") and (prefill != "sdpa" or small):
        pytest.skip("the same for every prefill backend")
    if prefill != "sdpa" and spec not in ("gqa 64/8", "mla 16") and step != "mixed":
        pytest.skip("compiles for long and shows no more")
    reasons = ATTENTION.get(prefill).why_not(AttentionNeed(SPECS[spec], BF16, CUDA))
    if reasons:
        pytest.skip("; ".join(reasons))
    if small:
        monkeypatch.setattr(packed.PackedBackend, "held_context", lambda self, page: 10 * page)
    case = Case(SPECS[spec], STEPS[step])
    want = case.run(make("torch", SPECS[spec], torch.float32), wide=True)
    assert not want.isnan().any()
    got = case.run(make(f"{prefill},triton", SPECS[spec]))
    assert not got.isnan().any()
    assert error(got, want) < 1e-2
    decodes = any(new == 1 for _, new in STEPS[step]) and isinstance(SPECS[spec], MLASpec)
    assert gluon == [meant_for_gluon(SPECS[spec])] * decodes


@pytest.mark.parametrize("spec", ["gqa 64/8", "mla 16"])
@torch.inference_mode()
def test_decode_in_a_graph(spec: str, gluon: list[bool]) -> None:
    """Captured once with dummy rows, replayed over other lengths, pages and contents."""
    attention = make("auto", SPECS[spec])
    assert attention.graphable
    case = Case(SPECS[spec], STEPS["skew"])
    live, static = case.batch, case.args
    rows = len(live.query_lens)
    padded = rows + 3
    batch = ForwardBatch(
        [1] * padded,
        [0] * padded,
        torch.zeros(padded, dtype=torch.int64, device=CUDA),
        torch.zeros(padded, dtype=torch.int64, device=CUDA),  # page 0 is nobody's
        torch.zeros(padded, live.pages.shape[1], dtype=torch.int64, device=CUDA),
    )
    mla = isinstance(SPECS[spec], MLASpec)
    split = 2 if mla else 3  # the last argument of MLA is a weight
    args = [torch.zeros(padded, *x.shape[1:], dtype=BF16, device=CUDA) for x in static[:split]]
    args += static[split:]
    kind = attention.mla if mla else attention.gqa
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kind(attention.plan(batch, PAGE), case.views[0], *args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kind(attention.plan(batch, PAGE), case.views[0], *args)
    assert gluon == [meant_for_gluon(SPECS[spec])] * (2 * mla)
    want = case.run(make("torch", SPECS[spec], torch.float32), wide=True)
    for name in ("positions", "slots", "pages"):
        getattr(batch, name)[:rows] = getattr(live, name)
    for buffer, value in zip(args[:split], static[:split], strict=True):
        buffer[:rows] = value
    graph.replay()
    assert error(out[:rows], want) < 1e-2
    graph.replay()
    assert error(out[:rows], want) < 1e-2
