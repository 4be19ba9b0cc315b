"""Routed experts on a card: against float64, and the two grouped GEMMs bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.config.model import MoEConfig
from baton.ops.moe import expert_mlp, expert_mlp_norm
from baton.ops.norm import add_rms_norm
from baton.ops.router import gate

BF16 = torch.bfloat16
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU",
)


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def oracle(x, experts, weights, gate_up, down, shared, tokens) -> torch.Tensor:
    rows = []
    for t in tokens:
        row = shared[t].double()
        for expert, weight in zip(experts[t], weights[t], strict=True):
            gated, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            row = row + weight.double() * (down[expert].double() @ (F.silu(gated) * up))
        rows.append(row)
    return torch.stack(rows)


def routing(kind: str, tokens: int, count: int, top_k: int) -> torch.Tensor:
    scores = torch.rand(tokens, count, device="cuda")
    if kind == "same":  # every token to the same experts, the rest empty
        scores[:, -top_k:] += 1
    if kind == "skewed":  # one expert has every token, most have none
        scores[:, 0] += 1
        scores[:, max(top_k, count // 4) :] -= 1
    if kind == "one apart":
        scores[:, :top_k] += 1
        scores[0, :top_k] -= 2
    return scores.topk(top_k, 1).indices


@pytest.fixture(scope="module")
def experts_weights():
    made = {}

    def make(count: int, hidden: int, inner: int, dtype: torch.dtype):
        key = count, hidden, inner, dtype
        if key not in made:
            made.clear()
            gate_up = torch.randn(count, 2 * inner, hidden, device="cuda", dtype=dtype)
            down = torch.randn(count, hidden, inner, device="cuda", dtype=dtype)
            made[key] = gate_up.mul_(hidden**-0.5), down.mul_(inner**-0.5)
        return made[key]

    return make


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("case", ["uniform", "same", "skewed"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 200, 3000])
@pytest.mark.parametrize("shape", [(64, 6, 512, 352), (192, 8, 1024, 192)])
def test_experts(experts_weights, shape, tokens, case, dtype) -> None:
    count, top_k, hidden, inner = shape
    gate_up, down = experts_weights(count, hidden, inner, dtype)
    x = torch.full((tokens + 5, hidden), torch.nan, device="cuda", dtype=dtype)
    x = x[:tokens].normal_()
    experts = routing(case, tokens, count, top_k)
    weights = torch.rand(tokens, top_k, device="cuda")
    shared = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    out = expert_mlp(x, experts, weights, gate_up, down, shared=shared)
    some = sorted({0, tokens - 1, tokens // 2, tokens // 3})
    want = oracle(x, experts, weights, gate_up, down, shared, some)
    assert out.isfinite().all()
    assert error(out[some], want) < {BF16: 8e-3, torch.float32: 1e-5}[dtype]
    assert torch.equal(out, expert_mlp(x, experts, weights, gate_up, down, shared=shared))


@pytest.mark.parametrize("case", ["uniform", "same"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 64, 200, 3000])
@pytest.mark.parametrize("shape", [(64, 6, 2, 512, 352), (192, 8, 1, 1024, 192)])
def test_experts_that_all_tokens_visit(experts_weights, shape, tokens, case) -> None:
    count, top_k, common, hidden, inner = shape
    gate_up, down = experts_weights(count + common, hidden, inner, BF16)
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
    shared = torch.arange(count, count + common, device="cuda").expand(tokens, -1)
    experts = torch.cat((routing(case, tokens, count, top_k), shared), 1)
    weights = torch.rand(tokens, top_k + common, device="cuda")
    weights[:, top_k:] = 1.0
    some = sorted({0, tokens - 1, tokens // 2, tokens // 3})
    out = expert_mlp(x, experts, weights, gate_up, down, common=common)
    want = oracle(x, experts, weights, gate_up, down, torch.zeros_like(x), some)
    assert error(out[some], want) < 8e-3
    assert torch.equal(out, expert_mlp(x, experts, weights, gate_up, down, common=common))


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 257, 3000])
@pytest.mark.parametrize(
    "shape",
    [(64, 6, 2, 512, 352), (64, 6, 2, 2048, 352), (32, 8, 1, 4096, 192), (16, 4, 0, 2880, 96)],
)
@pytest.mark.parametrize("apart", [False, True])
def test_the_next_norm_in_the_kernel_of_the_sum_changes_no_bit(
    experts_weights, apart, shape, tokens
) -> None:
    count, top_k, common, hidden, inner = shape
    gate_up, down = experts_weights(count + common, hidden, inner, BF16)
    x, residual, shared = torch.randn(3, tokens, hidden, device="cuda", dtype=BF16)
    columns = torch.arange(count, count + common, device="cuda").expand(tokens, -1)
    experts = torch.cat((routing("skewed", tokens, count, top_k), columns), 1)
    weights = torch.rand(tokens, top_k + common, device="cuda")
    norm = torch.rand(hidden, device="cuda", dtype=BF16) + 0.5
    parts = x, experts, weights, gate_up, down
    rest = {"shared": shared if apart else None, "common": common}
    out, total = expert_mlp_norm(*parts, residual, norm, 1e-5, **rest)
    want, want_total = add_rms_norm(expert_mlp(*parts, **rest), residual, norm, 1e-5)
    assert out.isfinite().all()
    assert torch.equal(out, want)
    assert torch.equal(total, want_total)


@pytest.mark.parametrize("roles", [True, False])
@pytest.mark.parametrize("shape", [(4, 2, 512, 352), (4, 2, 1024, 192)])
def test_the_height_of_a_tile_changes_no_bit(
    experts_weights, shape, roles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten tokens go to two experts, alone (part of a tile) or with others (whole tiles)."""
    from baton.ops.triton import moe_hopper

    if not roles:
        monkeypatch.setattr(moe_hopper, "supports", lambda *_: False)
    count, top_k, hidden, inner = shape
    gate_up, down = experts_weights(count, hidden, inner, BF16)
    x = torch.randn(400, hidden, device="cuda", dtype=BF16)
    weights = torch.rand(400, top_k, device="cuda")
    found = []
    for others in (0, 2):
        experts = torch.tensor([0, 1], device="cuda").repeat(400, 1)
        experts[10:] += others
        found.append(expert_mlp(x, experts, weights, gate_up, down)[:10])
    assert torch.equal(*found)


@pytest.mark.parametrize("tokens", [3, 64, 900])
def test_a_graph_follows_the_routing(experts_weights, tokens: int) -> None:
    """One capture serves any routing and any logits that its inputs hold at replay."""
    gate_up, down = experts_weights(66, 512, 352, BF16)
    config = MoEConfig(64, 6, 352, score="sigmoid", score_bias=True, shared_intermediate=704)
    weight, bias = torch.randn(64, 512, device="cuda"), torch.zeros(64, device="cuda")
    x = torch.randn(tokens, 512, device="cuda", dtype=BF16)

    def step() -> torch.Tensor:
        return expert_mlp(x, *gate(x, weight, bias, config), gate_up, down, common=2)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shift in (0.0, 50.0):
        x.normal_()
        bias.normal_()
        bias[:6] += shift  # then every token goes to the same experts
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, step())


#: (routed experts, top k, shared experts, hidden, intermediate): production shapes; widths that
#: are no whole number of tiles; rows shorter than one.
SHAPES = [
    (64, 6, 2, 2048, 1408),
    (192, 8, 1, 4096, 1536),
    (16, 4, 0, 2880, 720),
    (8, 2, 1, 136, 72),
    (1, 1, 0, 64, 256),
]
TOKENS = [33, 64, 65, 192, 193, 257, 500, 1023, 4096]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def case(request: pytest.FixtureRequest):
    count, top_k, common, hidden, inner = request.param
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up = torch.randn(count + common, 2 * inner, hidden, **make).mul_(hidden**-0.5)
    down = torch.randn(count + common, hidden, inner, **make).mul_(inner**-0.5)
    return count, top_k, common, gate_up, down


def poison() -> None:
    """What the allocator gives next holds NaN, and wild numbers where it is read as integers."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for size in (1 << 29, 1 << 19):  # it has a pool for small pieces
        torch.full((size,), torch.nan, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()


@hopper
@pytest.mark.parametrize("kind", ["uniform", "same", "skewed", "one apart"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_as_the_other_kernel(case, tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.ops.triton import moe, moe_hopper

    count, top_k, common, gate_up, down = case
    torch.manual_seed(tokens)
    hidden = down.shape[1]
    x = torch.full((tokens, hidden + 24), torch.nan, device="cuda", dtype=torch.bfloat16)
    x = x[:, :hidden].normal_()
    behind = torch.arange(count, count + common, device="cuda").expand(tokens, -1)
    experts = torch.cat((routing(kind, tokens, count, top_k), behind), 1)
    weights = torch.rand(tokens, top_k + common, device="cuda")
    weights[:, top_k:] = 1
    taken = moe_hopper.supports(x, count, top_k)
    assert taken == (tokens * top_k > moe_hopper.FROM * count)
    if not taken:
        pytest.skip("so few tokens an expert are the other kernel's")

    def run() -> torch.Tensor:
        return moe.products(x, experts, weights, gate_up, down, None, common).sum()

    poison()
    found = [run() for _ in range(3)]
    monkeypatch.setattr(moe_hopper, "supports", lambda *_: False)
    poison()
    want = run()
    assert all(torch.equal(out, want) for out in found)
    some = sorted({0, tokens - 1, tokens // 2})
    wanted = oracle(x, experts, weights, gate_up, down, torch.zeros_like(x), some)
    assert error(want[some], wanted) < 8e-3


@hopper
@pytest.mark.parametrize("tokens", [300, 1500])
def test_layer_after_layer_in_a_graph(case, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each kernel comes up while the one ahead runs, and buffers are used again."""
    from baton.ops.triton import moe, moe_hopper

    count, top_k, common, gate_up, down = case
    torch.manual_seed(tokens)
    norm = torch.ones(down.shape[1], device="cuda", dtype=torch.bfloat16)
    start = torch.randn(tokens, down.shape[1], device="cuda", dtype=torch.bfloat16)
    behind = torch.arange(count, count + common, device="cuda").expand(tokens, -1)
    weights = torch.rand(tokens, top_k + common, device="cuda").div_(top_k)
    layers = [torch.cat((routing("uniform", tokens, count, top_k), behind), 1) for _ in range(12)]

    def step() -> torch.Tensor:
        x = total = start
        for experts in layers:
            y = moe.products(x, experts, weights, gate_up, down, None, common).sum()
            x, total = add_rms_norm(y, total, norm, 1e-5)
        return x

    if not moe_hopper.supports(start, count, top_k):
        pytest.skip("so few tokens an expert are the other kernel's")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    found = []
    for _ in range(20):
        graph.replay()
        found.append(out.clone())
    monkeypatch.setattr(moe_hopper, "supports", lambda *_: False)
    want = step()
    assert want.isfinite().all()
    assert all(torch.equal(one, want) for one in found)
