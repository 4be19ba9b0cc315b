"""Attention with log-sum-exp against float64, and merging."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from baton.ops.attention import attend, attend_plain, merge

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03, torch.float16: 0.005}


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, blocked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) * scale
    if blocked is not None:
        scores = scores.masked_fill(blocked, -math.inf)
    out = scores.softmax(-1) @ v.double().repeat_interleave(group, 1)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "heads, kv_heads, dk, dv",
    [(4, 4, 16, 16), (24, 2, 96, 96), (3, 1, 7, 7), (4, 4, 24, 16), (16, 1, 40, 32), (2, 2, 8, 12)],
)
@pytest.mark.parametrize("queries, keys, causal", [(1, 1, True), (1, 17, False), (5, 5, True),
                                                   (33, 33, True), (3, 130, False)])  # fmt: skip
@pytest.mark.parametrize("run", [attend, attend_plain])
def test_against_float64(run, dtype, heads, kv_heads, dk, dv, queries, keys, causal) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, heads, queries, dk).to(dtype)
    k = torch.randn(2, kv_heads, keys, dk).to(dtype)
    v = torch.randn(2, kv_heads, keys, dv).to(dtype)
    blocked = torch.ones(queries, keys).triu(1).bool() if causal else None
    out, lse = run(q, k, v, 0.3, causal)
    want, want_lse = naive(q, k, v, 0.3, blocked)
    assert out.dtype == dtype
    assert out.shape == (2, heads, queries, dv)
    assert (out - want).abs().max() < TOLERANCE[dtype] * want.abs().max()
    assert (lse - want_lse).abs().max() < (1e-11 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("run", [attend, attend_plain])
def test_mask_and_strided_inputs(run) -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 4, 2, 8).transpose(1, 2).contiguous().transpose(1, 2)
    k, v = (torch.randn(3, 9, 2, 8).transpose(1, 2) for _ in range(2))
    blocked = torch.arange(9) >= torch.tensor([1, 5, 9])[:, None, None, None]
    mask = torch.zeros(3, 1, 1, 9).masked_fill_(blocked, -math.inf)
    out, lse = run(q, k, v, 0.5, mask=mask)
    want, want_lse = naive(q, k, v, 0.5, blocked)
    assert (out - want).abs().max() < 1e-5
    assert (lse - want_lse).abs().max() < 1e-5


def test_the_plain_path_cuts_queries_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 11, 8) for _ in range(3))
    whole = attend_plain(q, k, v, 0.3, causal=True)
    monkeypatch.setattr("baton.ops.attention._SCORE_ELEMENTS", 2 * 11 * 3)
    for a, b in zip(whole, attend_plain(q, k, v, 0.3, causal=True), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_scores_far_from_zero_do_not_overflow() -> None:
    q, k = torch.full((1, 1, 2, 4), 60.0), torch.full((1, 1, 3, 4), 60.0)
    out, lse = attend(q, k, torch.ones(1, 1, 3, 4), 1.0)
    assert torch.allclose(out, torch.ones_like(out))
    assert torch.allclose(lse, torch.tensor(14400.0 + math.log(3)))


@pytest.mark.parametrize("cuts", [[4], [1, 2, 9], [12]])
def test_merged_parts_are_the_whole(cuts: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 13, 8), torch.randn(1, 2, 13, 8)
    want, want_lse = attend(q, k, v, 0.3)
    edges = [0, *cuts, 13]
    out, lse = torch.full_like(want, math.nan), torch.full_like(want_lse, -math.inf)
    for start, stop in itertools.pairwise(edges):
        part = attend(q, k[:, :, start:stop], v[:, :, start:stop], 0.3)
        out, lse = merge(out, lse, *part)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse, want_lse, atol=1e-5)


def test_merging_nothing_with_nothing_is_zero() -> None:
    empty = torch.full((2, 3), math.nan), torch.full((2,), -math.inf)
    out, lse = merge(*empty, *empty)
    assert torch.equal(out, torch.zeros(2, 3))
    assert torch.equal(lse, torch.full((2,), -math.inf))
