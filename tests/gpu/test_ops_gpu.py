"""Kernels on a card, through the public operations, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from baton.config.model import MoEConfig
from baton.core.kv import KVShape
from baton.kv.format import make_views
from baton.ops import sample
from baton.ops.activation import silu_mul
from baton.ops.mla import head_products
from baton.ops.moe import expert_mlp_norm
from baton.ops.norm import add_rms_norm, rms_norm
from baton.ops.qkv import gqa_heads, mla_heads
from baton.ops.rope import Rotation
from baton.ops.router import gate, route, split_weight

BF16 = torch.bfloat16


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    out, want = out.cpu().double(), want.cpu().double()
    return float((out - want).norm() / want.norm())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 32, 33, 64, 65, 500, 3000])
@pytest.mark.parametrize("count, top_k, hidden", [(192, 8, 4096), (64, 6, 2048), (64, 6, 520)])
def test_gate(count: int, top_k: int, hidden: int, tokens: int, split: bool) -> None:
    config = MoEConfig(
        count, top_k, 1, score="sigmoid", score_bias=True, scale=2.826, shared_intermediate=1
    )
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
    weight = torch.randn(count, hidden, device="cuda") * 0.02
    bias = torch.randn(count, device="cuda") * 0.01
    experts, weights = gate(x, weight, bias, config, split_weight(weight) if split else None)
    logits = x.cpu().double() @ weight.cpu().double().t()
    want, want_weights = route(logits, bias.cpu().double(), config)
    experts, order = experts.cpu().sort(1)
    want, want_order = want.sort(1)
    same = (experts == want).all(1)
    assert same.double().mean() > 0.995  # but for ties
    got, right = weights.cpu().gather(1, order)[same], want_weights.gather(1, want_order)[same]
    assert error(got, right) < 1e-5


@pytest.mark.parametrize("tokens", [1, 17, 1000])
@pytest.mark.parametrize("dim", [128, 512, 2048, 4096, 7168])
def test_norms_and_silu(tokens: int, dim: int) -> None:
    x, residual = torch.randn(2, tokens, dim, device="cuda", dtype=BF16)
    weight = torch.rand(dim, device="cuda", dtype=BF16) + 0.5
    want = F.rms_norm(x.double(), (dim,), weight.double(), 1e-5)
    assert error(rms_norm(x, weight, 1e-5), want) < 4e-3
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert error(out, F.rms_norm(total.double(), (dim,), weight.double(), 1e-5)) < 4e-3
    first, second = x.double().chunk(2, -1)
    assert error(silu_mul(x), F.silu(first) * second) < 4e-3


def views(shape: KVShape):
    made = [make_views([shape], 70, 64, "bfloat16", BF16, d)[0] for d in ("cuda", "cpu")]
    for view, device in zip(made, ("cuda", "cpu"), strict=True):
        view.poison(torch.arange(70, device=device))
    return made


def same_pages(a, b) -> bool:
    a, b = a.paged()[0].cpu(), b.paged()[0]
    return torch.equal(a.isnan(), b.isnan()) and error(a.nan_to_num(), b.nan_to_num()) < 4e-3


@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads, dim, side", [((64, 8), 128, 64), ((12, 2), 128, 32)])
def test_gqa_heads(heads, dim, side, tokens, interleaved) -> None:
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * dim).to(BF16)
    norms = tuple((torch.rand(dim) + 0.5).to(BF16) for _ in "qk")
    turn = torch.rand(tokens, side) * 6
    slots = torch.randperm(70 * 64)[:tokens]
    mine, theirs = views(KVShape(heads[1], dim, dim))
    rotation = Rotation(turn.cos(), turn.sin(), interleaved)
    want = gqa_heads(qkv, heads, norms, 1e-5, rotation, theirs, slots)
    there = Rotation(turn.cos().cuda(), turn.sin().cuda(), interleaved)
    norms = tuple(n.cuda() for n in norms)
    out = gqa_heads(qkv.cuda(), heads, norms, 1e-5, there, mine, slots.cuda())
    assert all(error(a, b) < 4e-3 for a, b in zip(out, want, strict=True))
    assert same_pages(mine, theirs)
    values = mine.paged()[1].cpu().nan_to_num()
    assert torch.equal(values, theirs.paged()[1].nan_to_num())


@pytest.mark.parametrize("tokens", [1, 64, 1000, 3001])
def test_mla_heads(tokens: int) -> None:
    both, weight = torch.randn(tokens, 16 * 192 + 576).to(BF16), (torch.rand(512) + 0.5).to(BF16)
    q, kv = both[:, : 16 * 192].view(tokens, 16, 192), both[:, 16 * 192 :]
    turn, slots = torch.rand(tokens, 32) * 6, torch.randperm(70 * 64)[:tokens]
    mine, theirs = views(KVShape(1, 576, 512, shared_value=True))
    want = mla_heads(q, kv, weight, 1e-6, Rotation(turn.cos(), turn.sin(), True), theirs, slots)
    there = Rotation(turn.cos().cuda(), turn.sin().cuda(), True)
    both = both.cuda()
    q, kv = both[:, : 16 * 192].view(tokens, 16, 192), both[:, 16 * 192 :]
    out = mla_heads(q, kv, weight.cuda(), 1e-6, there, mine, slots.cuda())
    assert out[0].data_ptr() == q.data_ptr()  # in place: the kernel took strided rows
    assert all(error(a, b) < 4e-3 for a, b in zip(out, want, strict=True))
    assert same_pages(mine, theirs)


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 200])
@pytest.mark.parametrize("inner, width", [(128, 512), (512, 128), (24, 10)])
def test_head_products(tokens: int, inner: int, width: int) -> None:
    x = torch.randn(tokens, 16, inner + 64, device="cuda", dtype=BF16)[..., :inner]
    up = torch.randn(16, width, inner, device="cuda", dtype=BF16).transpose(1, 2)
    for weight in (up, up.contiguous()):
        want = head_products(x.double(), weight.double())
        assert error(head_products(x, weight), want) < 4e-3


def replay(
    chain: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    inputs: list[torch.Tensor],
    want: list[torch.Tensor],
) -> None:
    """A graph of `chain(x)` says what is wanted of each of the inputs, over and over."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for i in range(200):
        x.copy_(inputs[i % len(inputs)])
        graph.replay()
        assert torch.equal(out, want[i % len(inputs)])


def test_overlapping_kernels_wait_for_one_another() -> None:
    """Chains of launches in a graph: whoever reads too early reads what an earlier replay left."""
    moe = MoEConfig(64, 6, 256, score="sigmoid", score_bias=True, shared_intermediate=512)
    gate_up = torch.randn(66, 512, 512, device="cuda", dtype=BF16) / 20
    down = torch.randn(66, 512, 256, device="cuda", dtype=BF16) / 20
    router, bias = torch.randn(64, 512, device="cuda"), torch.zeros(64, device="cuda")
    weight = torch.ones(512, device="cuda", dtype=BF16)
    x = torch.empty(64, 512, device="cuda", dtype=BF16)

    def chain(y: torch.Tensor) -> torch.Tensor:
        total = y
        for _ in range(8):
            y, total = add_rms_norm(y, total, weight, 1e-5)
            chosen = gate(y, router, bias, moe)
            y, total = expert_mlp_norm(y, *chosen, gate_up, down, total, weight, 1e-5, common=2)
        return y

    inputs = [torch.randn(64, 512, device="cuda", dtype=BF16) for _ in range(4)]
    want = []
    for one in inputs:
        x.copy_(one)
        torch.cuda.synchronize()
        want.append(chain(x))
        torch.cuda.synchronize()
    replay(chain, x, inputs, want)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_latents_that_were_just_stored_are_read(rows: int) -> None:
    """Layers of latent attention in a graph. Latents and queries are read before the kernel ahead
    is through; whoever reads too early reads what an earlier replay left."""
    from baton.ops.triton.decode_mla import decode_mla, mla_launch
    from baton.ops.triton.split import Workspace, task_map

    heads, hidden, page, width = 16, 512, 64, 8
    launch, programs = mla_launch(heads), 132
    space = Workspace.make(2 * programs, launch.rows, 512, torch.device("cuda"))
    make = {"device": "cuda", "dtype": BF16}
    into = torch.randn(heads * 192 + 576, hidden, **make) / 16
    up, back = torch.randn(heads, 256, 512, **make) / 16, torch.randn(hidden, 2048, **make) / 40
    weight, turn = torch.ones(512, **make), torch.rand(rows, 32, device="cuda") * 6
    rotation = Rotation(turn.cos(), turn.sin(), True)
    shape = KVShape(1, 576, 512, shared_value=True)
    kept = make_views([shape] * 6, rows * width, page, "bfloat16", BF16, "cuda")
    for view in kept:
        view.paged()[0].normal_()
    pages = torch.randperm(rows * width, device="cuda").view(rows, width)
    positions = torch.randint(0, page * width, (rows,), device="cuda")
    positions[0] = 0
    slots = pages.gather(1, (positions // page)[:, None])[:, 0] * page + positions % page
    x = torch.empty(rows, hidden, **make)

    def chain(y: torch.Tensor, wait: Callable[[], None] = lambda: None) -> torch.Tensor:
        shares = task_map(positions, launch.tile, 1, programs, None, launch.least, launch.slack)
        for view in kept:
            both = F.linear(y, into)
            q, kv = both[:, : heads * 192].view(rows, heads, 192), both[:, heads * 192 :]
            q, _ = mla_heads(q, kv, weight, 1e-6, rotation, view, slots)
            wait()
            moved = head_products(q[..., :128], up[:, :128], early=True)
            wait()
            latents = view.paged()[0]
            mixed, _ = decode_mla(moved, q[..., 128:], latents, pages, shares, space, 0.07, launch)
            wait()
            out = head_products(mixed, up[:, 128:].transpose(1, 2))
            y = rms_norm(F.linear(out.flatten(1), back) + y, torch.ones(hidden, **make), 1e-5)
        return y

    inputs = [torch.randn(rows, hidden, **make) for _ in range(4)]
    want = []
    for one in inputs:
        x.copy_(one)
        want.append(chain(x, torch.cuda.synchronize))
    assert all(one.isfinite().all() for one in want)
    replay(chain, x, inputs, want)


@pytest.mark.parametrize("rows, vocab", [(1, 120832), (64, 120832), (9, 163840), (5, 1001)])
def test_sampling_is_the_plain_path_s(rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab) * 3
    logits[rows // 2, 5] = torch.nan
    slots = torch.randperm(100)[:rows]
    heat = torch.rand(100, 6, dtype=torch.float64) + 0.5
    heat[slots[::3], 0] = 0.0
    table = torch.randint(-(2**63), 2**63 - 1, (100, 3))
    counts = torch.arange(100)
    random = heat[slots, 0].nonzero().flatten()
    args = slots, heat[:, 0], table[:, 1], counts, random if len(random) else None
    want, want_bad = sample.choose(logits, *args)
    there = [None if a is None else a.cuda() for a in (slots, heat, table, counts, args[4])]
    there[1], there[2] = there[1][:, 0], there[2][:, 1]
    out, bad = sample.choose(logits.cuda(), *there)
    assert torch.equal(bad.cpu(), want_bad)
    assert (out.cpu() == want).double().mean() > 0.98


@pytest.mark.parametrize(
    "spread, temperature", [(3.0, 0.8), (0.0, 1.0), (30.0, 1.0), (1e4, 1e-3), (1.0, 100.0)]
)
@pytest.mark.parametrize("rows, vocab", [(1000, 20011), (128, 163840)])
def test_blocks_left_out_hold_no_winner(rows, vocab, spread, temperature, plain) -> None:
    logits = torch.randn(rows, vocab, device="cuda") * spread
    slots, counts = torch.randperm(rows, device="cuda"), torch.arange(rows, device="cuda")
    heat = torch.full((rows,), temperature, dtype=torch.float64, device="cuda")
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda")
    args = logits, slots, heat, seeds, counts, slots
    (out, bad), (want, _) = sample.choose(*args), plain(sample.choose, *args)
    assert int((out != want).sum()) <= 1  # two noisy values may tie up to their last bits
    assert not bad.any()


def test_rough_noise() -> None:
    """The hardware's logarithms are as exact as the sampling kernel takes them to be."""
    pytest.importorskip("triton")
    from helpers.noise import edge_hashes, rough_noise_error

    wrong = rough_noise_error(edge_hashes(2**24).cuda())
    assert wrong.min() > -1e-5
    assert wrong.max() < 2**-9.97


def test_draws_follow_the_softmax() -> None:
    """10,000 draws of one distribution: chi-squared over ten tokens."""
    draws, vocab = 10_000, 5000
    logits = torch.full((1, vocab), -20.0, device="cuda")
    logits[0, ::500] = torch.linspace(-1, 1, 10, device="cuda")
    slots = torch.arange(draws, device="cuda")
    heat = torch.ones(draws, dtype=torch.float64, device="cuda")
    seeds = torch.randint(-(2**63), 2**63 - 1, (draws,), device="cuda")
    counts = torch.zeros_like(slots)
    out, _ = sample.choose(logits.expand(draws, -1), slots, heat, seeds, counts, slots)
    seen = torch.bincount(out, minlength=vocab)[::500].double()
    expected = logits[0].double().softmax(0)[::500] * draws
    assert seen.sum() == draws
    assert ((seen - expected) ** 2 / expected).sum() < 33  # p = 1e-4 at 9 degrees


def test_head_keeps_float32() -> None:
    from baton.layers.embedding import _wide_linear

    x, weight = torch.randn(3, 512), torch.randn(1000, 512)
    x, weight = x.to("cuda", BF16), weight.to("cuda", BF16)
    out = _wide_linear(x, weight)
    assert out.dtype == torch.float32
    assert error(out, x.double() @ weight.double().t()) < 1e-5
