"""The torch backend over shuffled, poisoned pages against dense float64 attention."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch

from baton.attention import packed, torch_backend
from baton.attention.backend import ATTENTION, Attention, AttentionBackend, make_attention
from baton.attention.positions.rotary import RotaryPositions
from baton.attention.spec import AttentionNeed, GQASpec, MLASpec
from baton.attention.torch_backend import TorchBackend
from baton.config.model import RopeConfig
from baton.core.errors import ConfigError
from baton.core.forward import ForwardBatch
from baton.kv.format import make_views

GQA = GQASpec(6, 2, 8, 0.35)
MLA = MLASpec(3, 12, 8, 4, 6, 0.3)
CPU = torch.device("cpu")


def attention(spec: Any, dtype: torch.dtype = torch.float64, name: str = "auto") -> Attention:
    positions = RotaryPositions(RopeConfig(4), dtype, CPU)
    return make_attention(name, AttentionNeed(spec, dtype, CPU), positions)


class Pages:
    """A pool whose every page is NaN until it is written, handed out in random order."""

    def __init__(self, spec: Any, page_size: int, num_pages: int, dtype: str = "float64") -> None:
        (self.view,) = make_views([spec.kv_shape], num_pages, page_size, dtype, dtype, CPU)
        self.view.poison(torch.arange(num_pages))
        self.size = page_size
        self.free = list(range(1, num_pages))  # page 0 is the padding: nobody owns it
        random.Random(4).shuffle(self.free)

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // self.size))]

    def slots(self, pages: list[int], start: int, stop: int) -> list[int]:
        return [pages[t // self.size] * self.size + t % self.size for t in range(start, stop)]


def batch_of(pages: Pages, tables: list[list[int]], rows: list[tuple[int, int]]) -> ForwardBatch:
    """`rows[i]` = (context, new tokens) of the sequence with page table `tables[i]`."""
    width = max(len(table) for table in tables)
    spans = [(context, context + new) for context, new in rows]
    return ForwardBatch(
        query_lens=[new for _, new in rows],
        context_lens=[context for context, _ in rows],
        positions=torch.tensor([p for a, b in spans for p in range(a, b)]),
        slots=torch.tensor(
            [s for t, (a, b) in zip(tables, spans, strict=True) for s in pages.slots(t, a, b)]
        ),
        pages=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
    )


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last `len(q)` rows of causal attention; `[L, H, D]` with as many KV heads."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    context = k.shape[0] - q.shape[0]
    hidden = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + context
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


BATCHES = {
    "one token": [(0, 1)],
    "one chunk": [(0, 13)],
    "chunk over context": [(9, 6)],
    "context ends with a page": [(8, 4)],
    "decode alone": [(11, 1)],
    "decode ragged": [(0, 1), (30, 1), (7, 1), (8, 1), (3, 1)],
    "decode full pages": [(7, 1), (7, 1)],
    "mixed, decode between": [(5, 3), (12, 1), (0, 9), (0, 1), (20, 2), (4, 1)],
    "two chunks": [(1, 2), (17, 15)],
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION._entries, "plain", "attention.plain_packed:PlainPacked")


#: "plain" packs rows for a library of its own; with little workspace a context comes in blocks.
BACKENDS = [("torch", 0), ("plain", 8), ("plain", 1000)]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name, workspace", BACKENDS)
def test_gqa(
    case: str, page_size: int, name: str, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "WORKSPACE", workspace * 2 * 2 * 8 * 8)
    monkeypatch.setattr(torch_backend, "CONTEXT_BLOCK", 8)  # several blocks of context
    monkeypatch.setattr(torch_backend, "SHORT", 4)  # several groups of decode rows
    torch.manual_seed(1)
    pages, rows = Pages(GQA, page_size, 200), BATCHES[case]
    tables = [pages.take(context + new) for context, new in rows]
    total = [context + new for context, new in rows]
    k, v = ([torch.randn(n, 2, 8, dtype=torch.float64) for n in total] for _ in range(2))
    for i, (context, _) in enumerate(rows):
        slots = torch.tensor(pages.slots(tables[i], 0, context), dtype=torch.long)
        pages.view.store(slots, k[i][:context], v[i][:context])
    q = [torch.randn(new, 6, 8, dtype=torch.float64) for _, new in rows]
    run = attention(GQA, name=name)
    plan = run.plan(batch_of(pages, tables, rows), page_size)
    new_k = torch.cat([k[i][context:] for i, (context, _) in enumerate(rows)])
    new_v = torch.cat([v[i][context:] for i, (context, _) in enumerate(rows)])
    for _ in range(2):  # a plan serves every layer
        out = run.gqa(plan, pages.view, torch.cat(q), new_k, new_v)
        want = torch.cat(
            [
                dense(q[i], k[i].repeat_interleave(3, 1), v[i].repeat_interleave(3, 1), GQA.scale)
                for i in range(len(rows))
            ]
        )
        assert (out - want).abs().max() < 1e-12


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name, workspace", BACKENDS)
def test_mla_both_forms(
    case: str, page_size: int, name: str, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "WORKSPACE", workspace * (16 + 3 * 26) * 8)
    monkeypatch.setattr(torch_backend, "CONTEXT_BLOCK", 8)
    monkeypatch.setattr(torch_backend, "SHORT", 4)
    torch.manual_seed(1)
    pages, rows = Pages(MLA, page_size, 200), BATCHES[case]
    tables = [pages.take(context + new) for context, new in rows]
    latent = [torch.randn(context + new, 16, dtype=torch.float64) for context, new in rows]
    up = torch.randn(3, 8 + 6, 12, dtype=torch.float64)
    want = []
    q = [torch.randn(new, 3, 12, dtype=torch.float64) for _, new in rows]
    for i, (context, _) in enumerate(rows):
        slots = torch.tensor(pages.slots(tables[i], 0, context), dtype=torch.long)
        pages.view.store(slots, latent[i][:context, None], None)
        both = torch.einsum("tl,hnl->thn", latent[i][:, :12], up)
        shared = latent[i][:, None, 12:].expand(-1, 3, -1)
        keys = torch.cat((both[..., :8], shared), -1)
        want.append(dense(q[i], keys, both[..., 8:], MLA.scale))
    run = attention(MLA, name=name)
    plan = run.plan(batch_of(pages, tables, rows), page_size)
    new = torch.cat([latent[i][context:] for i, (context, _) in enumerate(rows)])
    out = run.mla(plan, pages.view, torch.cat(q), new, up)
    assert (out - torch.cat(want)).abs().max() < 1e-12


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("context, new", [(40, 5), (7, 6), (8, 30), (3, 5), (33, 1), (31, 2)])
def test_no_piece_outgrows_the_workspace(
    context: int, new: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the chunk alone does; the pieces are the whole, and only the last one is masked."""
    monkeypatch.setattr(packed, "WORKSPACE", 12 * 2 * 2 * 8 * 8)
    pages = Pages(GQA, page_size, 200)
    backend = attention(GQA, name="plain").prefill
    batch = batch_of(pages, [pages.take(context + new)], [(context, new)])
    (group,) = backend.plan_prefill(batch, [0], page_size).groups
    lengths = [piece.k_lens[0] for piece in group.pieces]
    assert sum(lengths) == context + new
    assert max(lengths) <= max(12, new + page_size - 1)
    assert [piece.causal for piece in group.pieces] == [False] * (len(lengths) - 1) + [True]


class Counting(TorchBackend):
    """Counts what it is asked for, and serves float64 only."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        return [] if need.dtype == torch.float64 else [f"dtype {need.dtype}"]

    def decode_gqa(self, *args: Any) -> torch.Tensor:
        self.calls.append("decode")
        return super().decode_gqa(*args)

    def prefill_gqa(self, *args: Any) -> torch.Tensor:
        self.calls.append("prefill")
        return super().prefill_gqa(*args)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    monkeypatch.setitem(ATTENTION._entries, "counting", f"{__name__}:Counting")
    Counting.calls.clear()
    return Counting


@pytest.mark.parametrize(
    "name, calls",
    [
        ("torch,counting", ["decode"]),
        ("counting,torch", ["prefill"]),
        ("counting", ["prefill", "decode"]),
    ],
)
def test_a_pair_of_backends_shares_a_step(
    counting: type[AttentionBackend], name: str, calls: list[str]
) -> None:
    pages, rows = Pages(GQA, 4, 20), [(0, 3), (0, 1)]
    tables = [pages.take(3), pages.take(1)]
    q, kv = torch.randn(4, 6, 8).double(), torch.randn(4, 2, 8).double()
    run = attention(GQA, name=name)
    run.gqa(run.plan(batch_of(pages, tables, rows), 4), pages.view, q, kv, kv)
    assert counting.calls == calls


def test_names_that_do_not_fit_say_why(counting: type[AttentionBackend]) -> None:
    with pytest.raises(ConfigError, match=r"counting: dtype torch\.float32"):
        attention(GQA, torch.float32, "torch,counting")
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        attention(GQA, name="troch")
    with pytest.raises(ConfigError, match="prefill,decode"):
        attention(GQA, name="torch,torch,torch")


def test_auto_chooses_each_half_alone(
    counting: type[AttentionBackend], plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ATTENTION, "_entries", dict(reversed(ATTENTION._entries.items())))
    run = attention(GQA)  # "plain", which has no decode, comes before "counting"
    assert type(run.prefill).__name__ == "PlainPacked"
    assert isinstance(run.decode, Counting)
    with pytest.raises(ConfigError, match="plain: does not decode"):
        attention(GQA, name="torch,plain")


def test_gpu_backends_say_why_not_on_a_cpu() -> None:
    need = AttentionNeed(GQASpec(8, 2, 512, 1.0), torch.float64, CPU)
    for name in ("fa4", "fa3", "sdpa", "triton"):
        reasons = " ".join(ATTENTION.get(name).why_not(need))
        assert "needs a CUDA device, this is cpu" in reasons
        assert "the model is float64" in reasons
        assert "512" in reasons
