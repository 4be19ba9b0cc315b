"""The grouped GEMMs with roles on a card: against float64, and bit for bit against Triton's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU",
    ),
]

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


def poison() -> None:
    """What the allocator gives next holds NaN, and wild numbers where it is read as integers."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for size in (1 << 29, 1 << 19):  # it has a pool for small pieces
        torch.full((size,), torch.nan, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()


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
    assert error(want, x, experts, weights, gate_up, down, some) < 8e-3


def error(out, x, experts, weights, gate_up, down, tokens: list[int]) -> float:
    rows = []
    for t in tokens:
        row = torch.zeros(x.shape[1], dtype=torch.float64, device="cuda")
        for expert, weight in zip(experts[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            row += weight.double() * (down[expert].double() @ (F.silu(gate) * up))
        rows.append(row)
    want = torch.stack(rows)
    return float((out[tokens].double() - want).norm() / want.norm())


@pytest.mark.parametrize("tokens", [300, 1500])
def test_layer_after_layer_in_a_graph(case, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each kernel comes up while the one ahead runs, and buffers are used again."""
    from baton.ops.norm import add_rms_norm
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
