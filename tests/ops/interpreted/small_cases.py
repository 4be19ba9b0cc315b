"""Norms, activation, heads and sampling as kernels, against the plain path or float64.
Collected by `test_triton_ops.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.kv.format import make_views
from baton.ops import mla as plain_mla
from baton.ops import norm as plain_norm
from baton.ops import qkv as plain_qkv
from baton.ops import rope as plain_rope
from baton.ops import sample as plain_sample
from baton.ops import step as plain_step
from baton.ops.rope import Rotation
from baton.ops.triton import activation, heads, norm, qkv, sample
from baton.ops.triton import angles as kernel_angles
from baton.ops.triton import step as kernel_step
from helpers.noise import edge_hashes, rough_noise_error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: The interpreter cuts bfloat16 instead of rounding it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    assert out.dtype == dtype
    size = want.abs().max()
    return bool(((out - want).abs() <= TOLERANCE[dtype] * (want.abs() + 0.3 * size)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 129), (2, 5, 128), (300, 64), (2, 4096)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dim = shape[-1]
    x = torch.randn(*shape[:-1], dim + 5).to(dtype)[..., :dim]  # strided rows
    residual, weight = torch.randn(shape).to(dtype), (torch.rand(dim) + 0.5).to(dtype)
    want = F.rms_norm(x.double(), (dim,), weight.double(), 1e-5)
    assert close(norm.rms_norm(x, weight, 1e-5), want, dtype)
    out, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert close(total, x.double() + residual.double(), dtype)
    assert close(out, F.rms_norm(total.double(), (dim,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(0, 8), (1, 8), (3, 129), (300, 64), (301, 96), (2, 4096)])
def test_embedding_and_norm(tokens: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vocab = 37
    table = torch.randn(vocab, dim + 5).to(dtype)[:, :dim]
    weight = (torch.rand(dim) + 0.5).to(dtype)
    ids = torch.randint(vocab, (tokens + 1,))[1:]
    ids[:2] = torch.tensor([vocab - 1, 0])[:tokens]
    out, rows = norm.embed_rms_norm(ids, table, weight, 1e-5)
    assert torch.equal(rows, F.embedding(ids, table))
    assert torch.equal(out, norm.rms_norm(rows, weight, 1e-5))
    if tokens:
        assert close(out, plain_norm.rms_norm(rows.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("tokens, half", [(0, 4), (1, 32), (130, 5), (17, 64)])
@pytest.mark.parametrize("scaling", [1.0, 1.2079441541679836])
def test_angles(tokens: int, half: int, scaling: float) -> None:
    positions = torch.randint(2**19, (tokens + 1,))[1:]
    positions[:2] = torch.tensor([2**19 - 1, 0])[:tokens]
    frequencies = 1e6 ** -(torch.arange(half) / half)
    out = kernel_angles.angles(positions, frequencies, scaling)
    want = plain_rope.angles(positions, frequencies, scaling)
    for a, b in zip(out, want, strict=True):
        assert a.shape == (tokens, half)
        assert torch.allclose(a, b, rtol=0, atol=3e-7)


@pytest.mark.parametrize("rows", [0, 1, 5, 131])
@pytest.mark.parametrize("width", [1, 7, 64, 2049])
@pytest.mark.parametrize("page_size", [16, 64])
def test_inputs_of_decodes(rows: int, width: int, page_size: int) -> None:
    torch.manual_seed(0)
    tables = torch.randint(10_000, (200, width))
    computed = torch.randint(width * page_size, (200,))
    computed[:2] = torch.tensor([0, width * page_size - 1])
    last = torch.randint(120_000, (200,))
    scrap = torch.full((3,), 199)  # rows that pad a batch
    computed[199] = 0
    for slots in (torch.randperm(199)[:rows], torch.cat((torch.arange(rows), scrap))[1:]):
        out = kernel_step.decode_inputs(slots, last, computed, tables, page_size)
        want = plain_step.decode_inputs(slots, last, computed, tables, page_size)
        for a, b in zip(out, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("size, length", [(64, 1), (64, 64), (256, 63), (768, 700), (768, 513)])
@pytest.mark.parametrize("width", [48, 300, 2049])
@pytest.mark.parametrize("page_size", [16, 64])
def test_inputs_of_a_prompt(size: int, length: int, width: int, page_size: int) -> None:
    torch.manual_seed(0)
    pages = torch.randint(1, 10_000, (200, width))
    computed = torch.randint(1000, (200,))
    for slot in (0, 77, 199):  # the last one pads
        head = torch.tensor([slot, length, *range(size)])
        mine, theirs = computed.clone(), computed.clone()
        out = kernel_step.prompt_inputs(head, size, mine, pages, page_size)
        want = plain_step.prompt_inputs(head, size, theirs, pages, page_size)
        for a, b in zip((*out, mine), (*want, theirs), strict=True):
            assert torch.equal(a, b)
        places = [pages[slot, i // page_size] * page_size + i % page_size for i in range(length)]
        assert out[0][:length].tolist() == places
        assert set((out[0][length:] // page_size).tolist()) <= {int(pages[199, 0])}


@pytest.mark.parametrize("rows, pad", [(0, 0), (0, 3), (1, 0), (5, 2), (128, 1), (200, 99)])
def test_the_end_of_decodes(rows: int, pad: int) -> None:
    torch.manual_seed(0)
    slots = torch.cat((torch.randperm(300)[:rows], torch.full((pad,), 300)))
    live = (torch.arange(rows + pad) < rows).long()
    tokens, bad = torch.randint(50, (rows + pad,)), torch.rand(rows + pad) < 0.3
    state = list(torch.randint(1000, (3, 301)).unbind())
    for one in state:
        one[300] = 0
    theirs = [one.clone() for one in state]
    out = kernel_step.advance(slots, live, tokens, bad, *state)
    want = plain_step.advance(slots, live, tokens, bad, *theirs)
    assert torch.equal(out, want)
    for a, b in zip(state, theirs, strict=True):
        assert torch.equal(a, b)
        assert a[300] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 2 * 1408), (2, 3, 74)])
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = 4 * torch.randn(*shape[:-1], shape[-1] + 3).to(dtype)[..., : shape[-1]]
    gate, up = x.double().chunk(2, -1)
    assert close(activation.silu_mul(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 130])
@pytest.mark.parametrize("count, inner, width", [(16, 128, 512), (4, 512, 128), (3, 24, 10)])
def test_head_products(count, inner, width, tokens, dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, count, inner + 7).to(dtype)[..., :inner]
    up = torch.randn(count, width, inner + 3).to(dtype)[..., :inner]  # columns are contiguous
    for weight in (up.transpose(1, 2), up.transpose(1, 2).contiguous()):
        for early in (False, True):
            out = heads.head_products(x, weight, early)
            assert out.is_contiguous()
            if tokens:
                assert close(out, plain_mla.head_products(x.double(), weight.double()), dtype)


def angles(tokens: int, side: int, interleaved: bool) -> Rotation:
    turn = torch.rand(tokens, side) * 6
    return Rotation(turn.cos(), turn.sin(), interleaved)


def pages(kv_heads: int, dim: int, value: int, dtype: torch.dtype, shared: bool = False):
    from baton.core.kv import KVShape

    name = str(dtype).removeprefix("torch.")
    shape = KVShape(kv_heads, dim, value, shared)
    views = make_views([shape, shape], 9, 4, name, dtype, "cpu")
    for view in views:
        view.poison(torch.arange(9))
    return views


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "heads, dim, side, tokens",
    [((4, 2), 16, 8, 5), ((3, 1), 24, 6, 1), ((20, 5), 40, 20, 4), ((8, 8), 8, 4, 130)],
)
def test_gqa_heads(heads, dim, side, tokens, normed, interleaved, dtype) -> None:
    torch.manual_seed(0)
    num_kv, width = heads[1], (heads[0] + 2 * heads[1]) * dim
    x = torch.randn(tokens, width + 7).to(dtype)[:, :width]
    norms = tuple((torch.rand(dim) + 0.5).to(dtype) for _ in "qk") if normed else None
    rotation = angles(tokens, side, interleaved)
    slots = torch.randperm(36)[:tokens] if tokens <= 36 else torch.arange(tokens) % 36
    mine, theirs = pages(num_kv, dim, dim, dtype)
    slots[36:] = -1  # rows that pad a batch
    turn = (rotation.cos, rotation.sin, interleaved)
    out = qkv.gqa_heads(x, heads, norms, 1e-5, turn, mine.paged(), slots)
    real = min(36, tokens)
    part = Rotation(rotation.cos[:real], rotation.sin[:real], interleaved)
    want = plain_qkv.gqa_heads(x[:real], heads, norms, 1e-5, part, theirs, slots[:real])
    for a, b in zip(out, want, strict=True):
        assert close(a[:real], b, dtype)
    for a, b in zip(mine.paged(), theirs.paged(), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert close(a.nan_to_num(), b.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("heads, nope, rank, side", [(3, 8, 24, 4), (20, 16, 40, 6)])
def test_mla_heads(heads, nope, rank, side, many, interleaved, dtype, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(qkv, "mla_tokens", lambda _: many)
    tokens = 5
    width = heads * (nope + 2 * side)
    both = torch.randn(tokens, width + rank + 2 * side).to(dtype)  # of one projection
    q, kv = both[:, :width].view(tokens, heads, -1), both[:, width:]
    weight = (torch.rand(rank) + 0.5).to(dtype)
    rotation, slots = angles(tokens, side, interleaved), torch.randperm(36)[:tokens]
    mine, theirs = pages(1, rank + 2 * side, rank, dtype, shared=True)
    want = plain_qkv.mla_heads(q, kv, weight, 1e-6, rotation, theirs, slots)
    turn = (rotation.cos, rotation.sin, interleaved)
    out = qkv.mla_heads(q, kv, weight, 1e-6, turn, mine.paged()[0], slots)
    for a, b in zip(out, want, strict=True):
        assert close(a, b, dtype)
    a, b = mine.paged()[0], theirs.paged()[0]
    assert torch.equal(a.isnan(), b.isnan())
    assert close(a.nan_to_num(), b.nan_to_num(), dtype)


@pytest.mark.parametrize("vocab", [1, 50, 2048, 5003])
def test_sampling_is_the_plain_path_s(vocab: int) -> None:
    torch.manual_seed(vocab)
    rows, slots = 12, torch.randperm(20)[:12]
    logits = torch.randn(rows, vocab) * 2
    temperatures = torch.rand(20, dtype=torch.float64) + 0.3
    temperatures[slots[::3]] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (20, 3))[:, 1]
    counts = torch.arange(20)
    random = temperatures[slots].nonzero().flatten()
    out, bad = sample.choose(logits, slots, temperatures, seeds, counts)
    want, want_bad = plain_sample.choose(logits, slots, temperatures, seeds, counts, random)
    assert torch.equal(out, want)
    assert torch.equal(bad, want_bad)


#: How wide logits are spread, about what, and temperatures: noise decides alone, not at all, or
#: among values that float32 rounds to about its size.
DRAWS = [
    (2.0, 0.0, 0.7), (0.0, 0.0, 1.0), (0.0, 0.0, 1e-40), (30.0, 0.0, 1.0), (1e4, 0.0, 1e-3),
    (1e30, 0.0, 1e-30), (1.0, 0.0, 100.0), (1.0, 1e7, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("programs", [3, 4000])
@pytest.mark.parametrize("spread, middle, temperature", DRAWS)
def test_blocks_left_out_hold_no_winner(
    spread: float, middle: float, temperature: float, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`programs`: so few that each goes over several rows."""
    torch.manual_seed(1)
    monkeypatch.setattr(sample, "_PROGRAMS", programs)
    rows, vocab = 24, 2900
    logits = torch.randn(rows, vocab) * spread + middle
    logits[::2, 1500:] = -torch.inf
    slots, counts = torch.randperm(rows), torch.arange(rows)
    heat = torch.full((rows,), temperature, dtype=torch.float64)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,))
    out, bad = sample.choose(logits, slots, heat, seeds, counts)
    want, _ = plain_sample.choose(logits, slots, heat, seeds, counts, slots)
    assert torch.equal(out, want)
    assert not bad.any()


def test_a_temperature_below_float32_is_not_greedy() -> None:
    logits, slots = torch.zeros(8, 3000), torch.arange(8)
    heat, seeds = torch.full((8,), 1e-60, dtype=torch.float64), torch.arange(8)
    out, _ = sample.choose(logits, slots, heat, seeds, seeds)
    want, _ = plain_sample.choose(logits, slots, heat, seeds, seeds, slots)
    assert torch.equal(out, want)
    assert len(out.unique()) == 8


def test_rough_noise() -> None:
    wrong = rough_noise_error(edge_hashes())
    assert wrong.min() > -1e-5
    assert wrong.max() < 2**-9.97
    assert wrong.max() - wrong.min() < sample._SLACK.value / 1.5


def test_sampling_of_unusable_rows_and_ties() -> None:
    vocab = 4100
    logits = torch.zeros(5, vocab)
    logits[1, 4099] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 4098] = -3.0  # all the rest is forbidden
    slots, zeros = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    for temperature in (0.0, 1e-40, 1.0):
        heat = torch.full((5,), temperature, dtype=torch.float64)
        out, bad = sample.choose(logits, slots, heat, zeros, zeros)
        assert bad.tolist() == [False, True, True, True, False]
        assert out[1:].tolist() == [0, 0, 0, 4098]
        if temperature == 0.0:
            assert out[0] == 0
