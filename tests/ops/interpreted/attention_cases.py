"""Decode kernels against float64, over shuffled pages that are NaN wherever nothing was stored.

Collected by `test_triton_attention.py` only. The interpreter's `tl.dot` is wrong for BF16
operands, so these use FP32 and FP16.
"""

from __future__ import annotations

import pytest
import torch

from attention.test_paged_attention import Pages, batch_of
from baton.attention.backend import Attention
from baton.attention.positions.rotary import RotaryPositions
from baton.attention.spec import AttentionNeed, GQASpec, MLASpec
from baton.attention.torch_backend import TorchBackend
from baton.attention.triton_backend import TritonBackend
from baton.config.model import RopeConfig
from baton.ops.attention import merge
from baton.ops.triton import merge as merge_kernels
from baton.ops.triton import mla_keys
from baton.ops.triton import pages as page_kernels
from baton.ops.triton.decode_gqa import decode_gqa, gqa_launch
from baton.ops.triton.decode_mla import decode_mla, mla_launch
from baton.ops.triton.split import Launch, Workspace, task_map


class Paged:
    """Sequences of `lengths` on shuffled pages `[N, page, heads, dim]`; page 0 is nobody's."""

    def __init__(self, lengths: list[int], page: int, heads: int, dim: int, dtype: torch.dtype):
        gen = torch.Generator().manual_seed(sum(lengths) + page)
        counts = [-(-n // page) for n in lengths]
        order = (torch.randperm(sum(counts) + 2, generator=gen) + 1).tolist()
        self.table = torch.full((len(lengths), max(counts) + 1), -(2**40))
        self.store = torch.full((len(order) + 1, heads, page, dim), torch.nan, dtype=dtype)
        self.tokens = []
        for i, n in enumerate(lengths):
            x = torch.randn(n, heads, dim, generator=gen).to(dtype)
            for j in range(counts[i]):
                self.table[i, j] = order.pop()
                part = x[j * page : (j + 1) * page]
                self.store[self.table[i, j], :, : len(part)] = part.transpose(0, 1)
            self.tokens.append(x.double())
        self.pages = self.store.transpose(1, 2)


def reference(q, keys, values, scale):
    """float64 `(out [B, H, D], lse [B, H])`; an empty sequence gives zeros and -inf."""
    outs, lses = [], []
    for row, k, v in zip(q.double(), keys, values, strict=True):
        group = row.shape[0] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("hd,nhd->hn", row, k) * scale
        lses.append(s.logsumexp(-1))
        outs.append(torch.einsum("hn,nhd->hd", s.softmax(-1).nan_to_num(), v))
    return torch.stack(outs), torch.stack(lses)


def close(got, want, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    return (got.double() - want).norm() <= tolerance * want.norm()


MIXES = {
    "one": [1],
    "borders": [63, 64, 65, 128, 1, 192],
    "skew": [700, 33, 2, 64],
    "empty": [100, 0, 5, 0],
    "uniform": [64, 64, 64],
}
F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("programs", [1, 7, 40])
@pytest.mark.parametrize("mix", MIXES)
def test_gqa_shares(mix: str, programs: int) -> None:
    check_gqa(MIXES[mix], 64, 2, 3, 64, programs, F32)


@pytest.mark.parametrize(
    "page, kv_heads, group, dim, dtype",
    [
        (16, 1, 8, 128, F16),
        (64, 3, 1, 96, F32),
        (64, 1, 12, 64, F16),
        (128, 1, 17, 80, F32),
        (1, 1, 2, 16, F32),
    ],
)
def test_gqa_shapes(page, kv_heads, group, dim, dtype) -> None:
    check_gqa([65, 130, 1], page, kv_heads, group, dim, 4, dtype)


def test_many_partials() -> None:
    """More than are combined at once."""
    check_gqa([2200], 64, 1, 2, 16, 80, F32)


@pytest.mark.parametrize("slack", [0, 2, 40])
@pytest.mark.parametrize("programs", [3, 9, 40])
@pytest.mark.parametrize("mix", ["borders", "skew", "empty", "uniform"])
def test_whole_shares(mix: str, programs: int, slack: int) -> None:
    check_gqa(MIXES[mix], 64, 2, 3, 64, programs, F32, slack=slack)
    check_mla(MIXES[mix], 64, 3, 32, 16, programs, mla_launch(3), F32, slack=slack)


@pytest.mark.parametrize("tiles, programs, slack, per, starts", [
    ([17] * 4, 9, 1, 9, [0, 18, 36, 54, 72]),  # every sequence in two
    ([17] * 4, 9, 0, 8, [0, 17, 34, 51, 68]),
    ([17] * 4, 7, 1, 10, [0, 17, 34, 51, 68]),  # whole shares would have to be longer
    ([17] * 4, 7, 7, 17, [0, 17, 34, 51, 68]),
    ([90, 1, 1, 1], 6, 20, 30, [0, 90, 120, 150, 180]),
    ([3, 0, 2], 2, 2, 3, [0, 3, 3, 6]),
    ([1] * 5, 4, 9, 2, [0, 1, 2, 3, 4, 5]),  # more sequences than programs
])  # fmt: skip
def test_line(tiles, programs, slack, per, starts) -> None:
    shares = task_map(torch.tensor(tiles) * 64 - 1, 64, 1, programs, slack=slack)
    assert shares.bounds.tolist() == [*starts, per]


@pytest.mark.parametrize("combiners", [1, 8, 10**6])
def test_shapes_of_the_combination(combiners: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads of a program, two, and a part of one."""
    monkeypatch.setattr("baton.ops.triton.split.COMBINERS", combiners)
    check_gqa([700, 33, 0], 64, 2, 8, 128, 7, F32)
    check_gqa([700, 33, 0], 64, 2, 8, 96, 5, F32)
    check_mla([700, 33, 0], 64, 3, 128, 16, 9, mla_launch(3), F32)


@pytest.mark.parametrize("least", [2, 4])
@pytest.mark.parametrize("mix", ["borders", "skew", "empty"])
def test_shares_of_at_least(mix: str, least: int) -> None:
    check_gqa(MIXES[mix], 64, 2, 3, 64, 40, F32, least=least)
    check_mla(MIXES[mix], 64, 3, 32, 16, 40, mla_launch(3), F32, least)


def check_gqa(lengths, page, kv_heads, group, dim, programs, dtype, least=1, slack=-1) -> None:
    keys = Paged(lengths, page, kv_heads, dim, dtype)
    values = keys.store.flip(-1).transpose(1, 2)
    q = torch.randn(len(lengths), kv_heads * group, dim).to(dtype)
    # Among other rows, as in a step that also prefills; positions are lengths - 1.
    positions = torch.full((2 * len(lengths),), 10**6)
    rows = torch.arange(len(lengths)) * 2 + 1
    positions[rows] = torch.tensor(lengths) - 1
    config = gqa_launch(group, dim, q.itemsize)
    shares = task_map(positions, config.tile, kv_heads, programs, rows, least, slack)
    space = Workspace.make(2 * programs, config.rows, dim, q.device)
    space.out.fill_(torch.nan), space.lse.fill_(torch.nan)
    out, lse = decode_gqa(q, keys.pages, values, keys.table, shares, space, 0.3, config)
    want, want_lse = reference(q, keys.tokens, [k.flip(-1) for k in keys.tokens], 0.3)
    assert close(out, want, dtype)
    assert torch.allclose(lse.double(), want_lse, atol=1e-3 if dtype == F16 else 1e-5)


@pytest.mark.parametrize("programs", [1, 9, 60])
@pytest.mark.parametrize("mix", MIXES)
def test_mla_shares(mix: str, programs: int) -> None:
    check_mla(MIXES[mix], 64, 3, 32, 16, programs, mla_launch(3), F32)


@pytest.mark.parametrize(
    "page, heads, latent, rope, config, dtype",
    [
        (16, 16, 128, 64, mla_launch(16), F16),
        (64, 80, 96, 48, mla_launch(80), F32),  # two blocks of heads, the second part empty
        (64, 32, 512, 64, mla_launch(32, 4), F32),
    ],
)
def test_mla_shapes(page, heads, latent, rope, config, dtype) -> None:
    check_mla([65, 130, 1], page, heads, latent, rope, 5, config, dtype)


def check_mla(
    lengths, page, heads, latent, rope, programs, config: Launch, dtype, least=1, slack=-1
):
    paged = Paged(lengths, page, 1, latent + rope, dtype)
    q = torch.randn(len(lengths), heads, latent + rope).to(dtype)
    positions = torch.tensor(lengths) - 1
    shares = task_map(
        positions, config.tile, -(-heads // config.rows), programs, None, least, slack
    )
    space = Workspace.make(2 * programs, config.rows, latent, q.device)
    space.out.fill_(torch.nan), space.lse.fill_(torch.nan)
    out, lse = decode_mla(
        q[..., :latent], q[..., latent:], paged.pages, paged.table, shares, space, 0.1, config,
    )  # fmt: skip
    values = [x[..., :latent] for x in paged.tokens]
    want, want_lse = reference(q, paged.tokens, values, 0.1)
    assert close(out, want, dtype)
    assert torch.allclose(lse.double(), want_lse, atol=1e-3 if dtype == F16 else 1e-5)


@pytest.mark.parametrize("tokens, heads, dim, wide", [(5, 2, 16, 24), (1100, 1, 40, 0)])
def test_store_and_gather(tokens: int, heads: int, dim: int, wide: int) -> None:
    """Into shuffled slots and back; nothing else is touched. `wide` 0: keys only."""
    page, count = 16, 80
    key_pages = torch.full((count, heads, page, dim), torch.nan).transpose(1, 2)
    value_pages = torch.full((count, heads, page, wide or 1), torch.nan).transpose(1, 2)
    table = torch.randperm(count)[: -(-tokens // page)]
    where = torch.arange(tokens)
    slots = table[where // page] * page + where % page
    both = torch.randn(tokens, heads, dim + max(wide, 1))  # strided rows, as from one projection
    key, value = both[..., :dim], both[..., dim:] if wide else None
    page_kernels.store(slots, key_pages, key, value_pages if wide else None, value)
    assert int(key_pages.isnan().sum()) == (count * page - tokens) * heads * dim
    lengths = [min(3, tokens), tokens]
    bounds = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    for store, want in ((key_pages, key), (value_pages, value)):
        if want is not None:
            out = torch.full((sum(lengths), *want.shape[1:]), torch.nan)
            page_kernels.gather(store, torch.stack((table, table)), tokens, bounds, out)
            assert torch.equal(out, torch.cat((want[: lengths[0]], want)))


def test_join_keys() -> None:
    both, latent = torch.randn(37, 3, 24 + 40), torch.randn(37, 32 + 8)
    out = torch.full((37, 3, 32), torch.nan)
    mla_keys.join(both[..., :24], latent[:, 32:], out)
    assert torch.equal(out[..., :24], both[..., :24])
    assert torch.equal(out[..., 24:], latent[:, None, 32:].expand(-1, 3, -1))


def test_merge_in_place() -> None:
    acc, more = torch.randn(2, 37, 3, 24)
    lse, new = torch.randn(2, 37, 3)
    lse[0, 0], new[1, 1], lse[2, 2], new[2, 2] = (-torch.inf,) * 4
    acc[0, 0], more[1, 1], acc[2, 2], more[2, 2] = (torch.nan,) * 4
    want, want_lse = merge(acc, lse, more, new)
    merge_kernels.merge_into(acc, lse, more, new.t().contiguous().t())
    assert torch.allclose(acc, want, atol=1e-6)
    assert torch.allclose(lse, want_lse, atol=1e-6)


@pytest.mark.parametrize("rows", [[(70, 1), (0, 5), (3, 1)], [(64, 1), (0, 1), (200, 1)]])
@pytest.mark.parametrize("spec", [GQASpec(6, 2, 16, 0.3), MLASpec(3, 32, 16, 8, 24, 0.3)])
def test_backend(spec: GQASpec | MLASpec, rows: list[tuple[int, int]]) -> None:
    """The whole backend in a step, alone and beside a prefill, against the reference backend."""
    device = torch.device("cpu")
    need, pages = AttentionNeed(spec, F32, device), Pages(spec, 16, 60, "float32")
    torch_backend = TorchBackend(need)
    tables, shape = [pages.take(a + b) for a, b in rows], spec.kv_shape
    for (context, _), table in zip(rows, tables, strict=True):
        slots = torch.tensor(pages.slots(table, 0, context), dtype=torch.long)
        key, value = torch.randn(2, context, shape.heads, shape.key_dim)
        pages.view.store(slots, key, None if shape.shared_value else value)
    batch, new = batch_of(pages, tables, rows), sum(b for _, b in rows)
    results = []
    for decode in (torch_backend, TritonBackend(need)):
        run = Attention(torch_backend, decode, RotaryPositions(RopeConfig(8), F32, device))
        plan = run.plan(batch, 16)
        torch.manual_seed(3)
        if isinstance(spec, MLASpec):
            q, latent = torch.randn(new, 3, 24), torch.randn(new, 40)
            results.append(run.mla(plan, pages.view, q, latent, torch.randn(3, 40, 32)))
        else:
            q, both = torch.randn(new, 6, 16), torch.randn(2, new, 2, 16)
            results.append(run.gqa(plan, pages.view, q, *both))
    assert torch.allclose(*results, atol=2e-5)
