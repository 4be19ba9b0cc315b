"""Routing and routed experts as kernels, against float64. Collected by `test_triton_ops.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.config.model import MoEConfig
from baton.ops import router as plain_router
from baton.ops.triton import moe, norm, router
from baton.ops.triton.align import align
from baton.ops.triton.combine import Products


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def oracle(x, experts, weights, gate_up, down, shared=None) -> torch.Tensor:
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(experts[t], weights[t], strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight.double() * (down[expert].double() @ (F.silu(gate) * up))
    return out if shared is None else out + shared.double()


def choices(case: str, tokens: int, count: int, top_k: int) -> torch.Tensor:
    if case == "same":  # every token to the same experts, the rest empty
        return torch.arange(count - top_k, count).repeat(tokens, 1)
    scores = torch.rand(tokens, count)
    if case == "skewed":
        scores[:, 0] += 2  # one expert has every token
        scores[:, count // 2 :] -= 2  # and half have none
    return scores.topk(top_k, 1).indices


def with_common(experts: torch.Tensor, count: int, common: int) -> torch.Tensor:
    """The `common` experts behind `count` routed ones, for every token."""
    shared = torch.arange(count, count + common).repeat(experts.shape[0], 1)
    return torch.cat((experts, shared), 1)


@pytest.mark.parametrize("block_m", [1, 16, 64])
@pytest.mark.parametrize("case", ["same", "skewed", "uniform"])
@pytest.mark.parametrize("tokens", [1, 7, 83, 1500])
def test_alignment(case: str, tokens: int, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(tokens)
    # 1500 tokens: 18 chunks of several steps each, counts read in two goes
    monkeypatch.setattr("baton.ops.triton.align.CHUNKS", 20)
    count, top_k = 12, 3
    experts = choices(case, tokens, count, top_k)
    plan = align(experts, count, block_m)
    flat = experts.flatten()
    pairs, used = flat.numel(), int(plan.ends[-1])
    sizes = torch.bincount(flat, minlength=count)
    assert torch.equal(plan.ends.long(), (-(-sizes // block_m) * block_m).cumsum(0))
    assert used <= plan.blocks * block_m
    rows, place = plan.rows[:used].long(), plan.place.long()
    assert torch.equal(rows[place], torch.arange(pairs))
    assert (rows == pairs).sum() == used - pairs
    if block_m > 1:
        assert torch.equal(plan.experts[place // block_m].long(), flat)
    # in order within an expert
    for expert in range(count):
        own = place[flat == expert]
        assert torch.equal(own, own.sort().values)


@pytest.mark.parametrize("block_m", [1, 16, 64])
@pytest.mark.parametrize("case", ["same", "skewed", "uniform"])
@pytest.mark.parametrize("tokens", [1, 16, 83])
def test_alignment_has_room_for_experts_that_all_tokens_visit(
    case: str, tokens: int, block_m: int
) -> None:
    count, top_k, common = 12, 3, 2
    experts = with_common(choices(case, tokens, count, top_k), count, common)
    plan, loose = (align(experts, count + common, block_m, known) for known in (common, 0))
    assert int(plan.ends[-1]) <= plan.blocks * block_m <= loose.blocks * block_m
    assert torch.equal(plan.place, loose.place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["same", "skewed", "uniform"])
@pytest.mark.parametrize("tokens", [1, 5, 16, 60])
def test_experts(case: str, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    count, top_k, hidden, inner = 6, 3, 136, 72
    experts = choices(case, tokens, count, top_k)
    weights = torch.rand(tokens, top_k)
    # More columns than are used, NaN beside and behind: nothing there may be read.
    wide = torch.full((tokens + 3, hidden + 24), torch.nan, dtype=dtype)
    wide[:tokens, :hidden] = torch.randn(tokens, hidden)
    x = wide[:tokens, :hidden]
    gate_up = (torch.randn(count, 2 * inner, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(count, hidden, inner) * inner**-0.5).to(dtype)
    gate_up[~torch.isin(torch.arange(count), experts)] = torch.nan  # never touched
    shared = torch.randn(tokens, hidden).to(dtype) if case != "same" else None
    out = moe.products(x, experts, weights, gate_up, down, shared).sum()
    want = oracle(x, experts, weights, gate_up, down, shared)
    limit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}[
        dtype
    ]  # bfloat16 is cut, not rounded, here
    assert out.dtype == dtype
    assert error(out, want) < limit


@pytest.mark.parametrize("common", [1, 2])
@pytest.mark.parametrize("case", ["same", "uniform"])
@pytest.mark.parametrize("tokens", [1, 4, 10, 16, 60])  # up to 10 without alignment
def test_experts_that_all_tokens_visit(case: str, tokens: int, common: int) -> None:
    torch.manual_seed(tokens)
    count, top_k, hidden, inner = 6, 3, 136, 72
    experts = with_common(choices(case, tokens, count, top_k), count, common)
    weights = torch.rand(tokens, top_k + common)
    x = torch.randn(tokens, hidden)
    gate_up = torch.randn(count + common, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(count + common, hidden, inner) * inner**-0.5
    out = moe.products(x, experts, weights, gate_up, down, None, common).sum()
    assert error(out, oracle(x, experts, weights, gate_up, down)) < 2e-6


@pytest.mark.parametrize(
    "tokens, hidden, dtype",
    [
        (1, 136, torch.float32),
        (9, 2056, torch.bfloat16),
        (5, 2056, torch.float16),
        (257, 24, torch.float16),  # several narrow rows to a program of the norm
    ],
)
@pytest.mark.parametrize(
    "tile, common, shared", [(0, 0, False), (0, 0, True), (16, 0, True), (16, 2, False)]
)
def test_sum_and_norm_in_one_kernel_change_no_bit(
    tile: int, common: int, shared: bool, tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    top_k = 3 + common
    if tile:  # one for each routed pair, then `common` whose rows are the tokens
        rows = (tokens * 3 + common) * max(tile, tokens)
        tile = max(tile, tokens)
        place = torch.empty(0, dtype=torch.int32)
    else:
        rows = tokens * top_k + 40
        place = torch.randperm(rows)[: tokens * top_k].int()
    y = torch.full((rows, hidden), torch.nan, dtype=dtype)  # of which some is never written
    written = place.long() if not tile else positions(tokens, 3, common, tile)
    y[written] = torch.randn(len(written), hidden).to(dtype)
    weights = torch.rand(tokens, top_k)
    wide = torch.full((tokens, hidden + 8), torch.nan, dtype=dtype)
    wide[:, :hidden] = torch.randn(tokens, hidden)
    extra = torch.randn(tokens, hidden).to(dtype) if shared else None
    products = Products(y, weights, place, extra, tile, common)
    weight = (torch.rand(hidden) + 0.5).to(dtype)
    out, total = products.add_rms_norm(wide[:, :hidden], weight, 1e-5)
    want, want_total = norm.add_rms_norm(products.sum(), wide[:, :hidden], weight, 1e-5)
    assert out.isfinite().all()
    assert torch.equal(out, want)
    assert torch.equal(total, want_total)


def positions(tokens: int, routed: int, common: int, tile: int) -> torch.Tensor:
    """Rows that are written without alignment."""
    alone = torch.arange(tokens * routed) * tile
    together = (tokens * routed + torch.arange(common)[:, None]) * tile + torch.arange(tokens)
    return torch.cat((alone, together.flatten()))


@pytest.mark.parametrize("tokens", [0, 4, 60])
def test_experts_up_to_the_next_norm(tokens: int) -> None:
    torch.manual_seed(0)
    count, top_k, hidden, inner, common = 6, 3, 136, 72, 2
    experts = with_common(choices("uniform", tokens, count, top_k), count, common)
    weights = torch.rand(tokens, top_k + common)
    x, residual = torch.randn(2, tokens, hidden)
    gate_up = torch.randn(count + common, 2 * inner, hidden) * hidden**-0.5
    down = torch.randn(count + common, hidden, inner) * inner**-0.5
    weight = torch.rand(hidden) + 0.5
    products = moe.products(x, experts, weights, gate_up, down, None, common)
    out, total = products.add_rms_norm(residual, weight, 1e-5)
    assert out.shape == total.shape == (tokens, hidden)
    if tokens:
        want = oracle(x, experts, weights, gate_up, down) + residual.double()
        assert error(total, want) < 2e-6
        assert error(out, F.rms_norm(want, (hidden,), weight.double(), 1e-5)) < 2e-6


@pytest.mark.parametrize("mean", [2, 15, 40, 100])
def test_every_tile_shape(mean: int) -> None:
    torch.manual_seed(mean)
    count, hidden, inner, tokens = 3, 64, 200, 3 * mean
    experts = torch.cat([torch.full((n, 1), e) for e, n in enumerate((tokens - 1, 0, 1))])
    experts = experts[torch.randperm(tokens)]
    x = torch.randn(tokens, hidden).half()
    gate_up = (torch.randn(count, 2 * inner, hidden) * 0.1).half()
    down = (torch.randn(count, hidden, inner) * 0.1).half()
    weights = torch.rand(tokens, 1)
    if tokens <= moe.DIRECT_PAIRS:
        pytest.skip("no tiles are shared")
    out = moe.products(x, experts, weights, gate_up, down).sum()
    assert error(out, oracle(x, experts, weights, gate_up, down)) < 1e-3


@pytest.mark.parametrize("tokens", [1, 20, 70])
@pytest.mark.parametrize("count, hidden", [(24, 264), (72, 264), (24, 2184)])
def test_gate_is_as_good_as_float32(tokens: int, count: int, hidden: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden + 8).bfloat16()[:, :hidden]
    weight = torch.randn(count, hidden)
    out = router.gate_logits(x, weight).sum(0)
    want = x.double() @ weight.double().t()
    assert error(out, want) < max(2e-7, 2 * error(x.float() @ weight.t(), want))


def test_split_weights_are_as_good_as_float32() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 264).bfloat16(), torch.randn(24, 264)
    parts = router.split_weight(weight)
    assert torch.equal(parts.view(3, 24, 264).float().sum(0), weight)
    out = (x.float() @ parts.float().t()).view(70, 3, 24).transpose(0, 1)
    want = x.double() @ weight.double().t()
    assert error(out.sum(0), want) < max(2e-7, 2 * error(x.float() @ weight.t(), want))
    config = MoEConfig(24, 3, 1)
    experts, weights = router.choose(out, None, config)
    want_experts, want_weights = router.choose(out.sum(0)[None], None, config)
    assert torch.equal(experts, want_experts)
    assert torch.allclose(weights, want_weights)


MOES = {
    "hy3": MoEConfig(
        192, 8, 1, score="sigmoid", score_bias=True, scale=2.826, shared_intermediate=1
    ),
    "moonlight": MoEConfig(
        64, 6, 1, score="sigmoid", score_bias=True, scale=2.446, shared_intermediate=2
    ),
    "qwen3": MoEConfig(128, 8, 1),
    "softmax, as they are": MoEConfig(20, 3, 1, normalise=False),
    "groups by two": MoEConfig(
        64,
        8,
        1,
        score="sigmoid",
        score_bias=True,
        groups=8,
        top_groups=4,
        group_score="top2",
        shared_intermediate=1,
    ),
    "groups by one": MoEConfig(64, 6, 1, groups=8, top_groups=3, normalise=False, scale=16.0),
}


@pytest.mark.parametrize("name", MOES)
@pytest.mark.parametrize("parts", [1, 3])
def test_choice(name: str, parts: int) -> None:
    config = MOES[name]
    torch.manual_seed(1)
    logits = torch.randn(parts, 9, config.num_experts)
    bias = torch.randn(config.num_experts) * 0.1 if config.score_bias else None
    assert router.supported(config.num_experts, config)
    experts, weights = router.choose(logits, bias, config)
    want_experts, want = plain_router.route(logits.sum(0), bias, config)
    order, want_order = experts.argsort(1), want_experts.argsort(1)
    assert torch.equal(experts.gather(1, order), want_experts.gather(1, want_order))
    assert torch.allclose(weights.gather(1, order), want.gather(1, want_order), rtol=1e-5)


@pytest.mark.parametrize("name", MOES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_useless_logits_still_choose_distinct_experts(name: str, value: float) -> None:
    config = MOES[name]
    logits = torch.full((1, 2, config.num_experts), value)
    logits[0, 1, 3:] = 1.0
    experts, _ = router.choose(logits, None, config)
    assert (experts >= 0).all()
    chosen, shared = experts.split([config.top_k, config.shared_experts], 1)
    assert (chosen < config.num_experts).all()
    assert all(len(set(row)) == config.top_k for row in chosen.tolist())
    assert (shared == torch.arange(config.shared_experts) + config.num_experts).all()
