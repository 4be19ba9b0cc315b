"""Small fused operations on the card: error, time and byte limit, beside PyTorch's chain.

    python benchmarks/ops/small.py [--only inputs,embed,norm,combine,silu,gqa,gate,...] [--out F]

Several copies of the inputs are used in turn, 128 MB of them or 32, so that large cases come
from memory; small ones show launch and latency, as they do in a decode step.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from timing import Call, Table, attempt, plain, relative_error

from baton.config.model import MoEConfig
from baton.core.kv import KVShape
from baton.kv.format import make_views
from baton.layers.embedding import _wide_linear
from baton.ops import sample
from baton.ops.activation import silu_mul
from baton.ops.mla import head_products
from baton.ops.norm import add_rms_norm, embed_rms_norm, rms_norm
from baton.ops.qkv import gqa_heads, mla_heads
from baton.ops.rope import Rotation, angles
from baton.ops.router import gate, split_weight
from baton.ops.step import advance, decode_inputs

BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def copies(moved: float) -> int:
    return int(min(32, max(2, 128e6 // moved)))


def both(calls: list[Call]) -> dict[str, float | str]:
    """Our time, and that of the plain chain."""
    ours = attempt(calls)
    with plain():
        return {"ours": ours, "torch": attempt(calls)}


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def compare(call: Call) -> float:
    """Difference from the plain path, which rounds at the same places."""
    out = first(call()).clone()
    with plain():
        return relative_error(out, first(call()))


def norm(table: Table) -> None:
    for tokens, dim in ((1, 4096), (64, 4096), (1024, 4096), (16384, 4096), (16384, 2048)):
        moved = 8.0 * tokens * dim
        weight = randn(dim)
        pairs = [(randn(tokens, dim), randn(tokens, dim)) for _ in range(copies(moved))]
        calls = [partial(add_rms_norm, *p, weight, 1e-5) for p in pairs]
        table.add(f"add+norm {tokens}x{dim}", both(calls), moved, error=compare(calls[0]))


def combine(table: Table) -> None:
    """The sum of a token's experts with the next norm: one kernel, or one behind the other,
    whose bits must be the same: the error is 0."""
    from baton.ops.triton.combine import Products

    for top_k, hidden in ((8, 2048), (9, 4096)):
        norm = randn(hidden)
        for tokens in (1, 16, 64, 256, 1024, 4096, 16384):
            moved = tokens * hidden * (2.0 * top_k + 6)
            weights = torch.rand(tokens, top_k, device="cuda")
            many = []
            for _ in range(copies(moved)):
                place = torch.randperm(tokens * top_k, device="cuda").int()
                y, residual = randn(tokens * top_k, hidden), randn(tokens, hidden)
                many.append((Products(y, weights, place), residual))
            fused = [partial(p.add_rms_norm, r, norm, 1e-5) for p, r in many]
            apart = [partial(summed_then_normed, p, r, norm) for p, r in many]
            wrong = relative_error(fused[0]()[0], apart[0]()[0])
            times = {"fused": attempt(fused), "separate": attempt(apart)}
            table.add(f"sum {top_k}+add+norm {tokens}x{hidden}", times, moved, error=wrong)


def summed_then_normed(products: Any, residual: torch.Tensor, norm: torch.Tensor) -> Any:
    return add_rms_norm(products.sum(), residual, norm, 1e-5)


def silu(table: Table) -> None:
    for rows, width in ((64, 1536), (1024, 13312), (131072, 1536)):
        moved = 6.0 * rows * width
        calls = [partial(silu_mul, randn(rows, 2 * width)) for _ in range(copies(moved))]
        table.add(f"silu*mul {rows}x{width}", both(calls), moved, error=compare(calls[0]))


def rotation(tokens: int, side: int, interleaved: bool) -> Rotation:
    turn = torch.rand(tokens, side, device="cuda") * 6
    return Rotation(turn.cos(), turn.sin(), interleaved)


def gqa(table: Table) -> None:
    heads, dim, norms = (64, 8), 128, (randn(128), randn(128))
    (view,) = make_views([KVShape(8, 128, 128)], 600, 64, "bfloat16", BF16, "cuda")
    for tokens in (1, 64, 1024, 16384):
        # read q, k, v; write q, k (for prefill) and k, v into pages; cos and sin
        moved = 2.0 * tokens * 128 * (80 + 72 + 16) + 8 * 64 * tokens
        turn = rotation(tokens, 64, False)
        slots = torch.randperm(600 * 64, device="cuda")[:tokens]
        many = [randn(tokens, 80 * dim) for _ in range(copies(moved))]
        calls = [partial(gqa_heads, x, heads, norms, 1e-5, turn, view, slots) for x in many]
        table.add(f"gqa norm+rope+store {tokens}", both(calls), moved, error=compare(calls[0]))


def mla(table: Table) -> None:
    weight = randn(512)
    (view,) = make_views([KVShape(1, 576, 512, True)], 600, 64, "bfloat16", BF16, "cuda")
    for tokens in (1, 64, 1024, 16384):
        moved = 2.0 * tokens * (16 * 64 * 2 + 576 * 3) + 8 * 32 * tokens
        turn = rotation(tokens, 32, True)
        slots = torch.randperm(600 * 64, device="cuda")[:tokens]
        many = [randn(tokens, 16 * 192 + 576) for _ in range(copies(moved))]
        parts = [(x[:, :-576].view(tokens, 16, 192), x[:, -576:]) for x in many]
        calls = [partial(mla_heads, *p, weight, 1e-6, turn, view, slots) for p in parts]
        table.add(f"mla norm+rope+store {tokens}", both(calls), moved)


def products(table: Table) -> None:
    """Around absorbed MLA of 16 heads: into the latents, and out of them."""
    for tokens in (1, 16, 64, 256):
        for inner, width in ((128, 512), (512, 128)):
            moved = 2.0 * 16 * (inner * width + tokens * (inner + width))
            calls = [
                partial(head_products, randn(tokens, 16, inner), randn(16, inner, width))
                for _ in range(copies(moved))
            ]
            name = f"head products {tokens} x 16 x {inner}x{width}"
            table.add(name, both(calls), moved, error=compare(calls[0]))


def router(table: Table) -> None:
    """The gate behind a norm, as in a layer: it reads weights while the norm runs."""
    from baton.ops.triton import router as kernels

    for count, top_k, hidden in ((192, 8, 4096), (64, 6, 2048)):
        config = MoEConfig(count, top_k, 1, score="sigmoid", score_bias=True, shared_intermediate=1)
        bias = torch.randn(count, device="cuda") * 0.01
        weights = [randn(count, hidden, dtype=torch.float32) * 0.02 for _ in range(16)]
        for tokens in (1, 16, 32, 64, 256, 1024, 4096, 16384):
            x, few = randn(tokens, hidden), weights[: 16 if tokens <= 1024 else 2]
            calls = [partial(gate, x, w, bias, config) for w in few]
            split = [partial(gate, x, w, bias, config, split_weight(w)) for w in few]
            kept, kernels.SPLIT_FROM = kernels.SPLIT_FROM, 0
            times = both(calls) | {"split": attempt(split)}
            kernels.SPLIT_FROM = kept
            norm = randn(hidden)
            times["norm+ours"] = attempt([partial(normed_gate, x, norm, c) for c in calls])
            want = (x.double() @ weights[0].double().t()).sigmoid()
            experts, _ = calls[0]()
            best = (want + bias.double()).topk(top_k).values.sum()
            chosen = (want + bias.double()).gather(1, experts[:, :top_k])
            regret = float(1 - chosen.sum() / best)
            moved = 4.0 * count * hidden + 2 * tokens * hidden
            flops = 6.0 * tokens * count * hidden
            table.add(f"gate+choose {count}x{hidden} T={tokens}", times, moved, flops, regret)


def normed_gate(x: torch.Tensor, norm: torch.Tensor, call: Call) -> None:
    add_rms_norm(x, x, norm, 1e-5)
    call()


def alignment(table: Table) -> None:
    from baton.ops.triton.align import align

    for count, top_k, block in ((64, 6, 128), (192, 8, 128), (193, 9, 16)):
        for tokens in (16, 64, 256) if block == 16 else (1024, 4096, 16384):
            scores = [torch.rand(tokens, count, device="cuda") for _ in range(8)]
            chosen = [x.topk(top_k, 1).indices for x in scores]
            calls = [partial(align, ids, count, block) for ids in chosen]
            moved = tokens * top_k * 16.0
            table.add(f"align {tokens}x{top_k} of {count}", {"ours": attempt(calls)}, moved)


def sampling(table: Table) -> None:
    heat = torch.rand(512, 6, device="cuda", dtype=torch.float64) + 0.5
    ints = torch.randint(-(2**62), 2**62, (512, 3), device="cuda")
    counts = torch.arange(512, device="cuda")
    for vocab, rows in product((120832, 163840), (1, 16, 64, 256)):
        slots = torch.arange(rows, device="cuda")
        moved = 4.0 * rows * vocab
        many = [randn(rows, vocab, dtype=torch.float32) * 3 for _ in range(copies(moved))]
        for name, random in (("greedy", None), ("temperature", slots)):
            tables = heat[:, 0], ints[:, 0], counts
            calls = [partial(sample.choose, x, slots, *tables, random) for x in many]
            if random is None:
                heat[:, 0] = 0.0
            else:
                heat[:, 0] = 0.8
            ours = calls[0]()[0].clone()
            with plain():
                same = float((ours != calls[0]()[0]).double().mean())
            table.add(f"sample {name} {rows}x{vocab}", both(calls), moved, error=same)


def head(table: Table) -> None:
    weight = randn(120832, 4096)
    for rows in (1, 16, 64):
        x = randn(rows, 4096)
        times = {
            "ours": attempt([partial(_wide_linear, x, weight)]),
            "bf16 out": attempt([partial(F.linear, x, weight)]),
        }
        wrong = relative_error(
            _wide_linear(x, weight)[:, :512], x.double() @ weight[:512].double().t()
        )
        moved = 2.0 * weight.numel() + 4.0 * rows * weight.shape[0]
        table.add(f"head {rows}x4096x120832", times, moved, error=wrong)


def differing(call: Call) -> float:
    """Share of elements that are not, to the bit, those of the plain path."""
    ours = [one.clone() for one in call()]
    with plain():
        pairs = list(zip(ours, call(), strict=True))
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a in ours)


def embedding(table: Table) -> None:
    """The plain path norms with PyTorch, too, whose sums run in another order."""
    for vocab, hidden in ((120832, 4096), (163840, 2048)):
        weight, rows = randn(hidden), randn(vocab, hidden)
        for tokens in (1, 16, 64, 256, 4096, 16384):
            moved = tokens * (6.0 * hidden + 8)
            many = [torch.randint(vocab, (tokens,), device="cuda") for _ in range(copies(moved))]
            calls = [partial(embed_rms_norm, ids, rows, weight, 1e-5) for ids in many]
            apart = [partial(embedded_then_normed, ids, rows, weight) for ids in many]
            times = both(calls) | {"separate": attempt(apart)}
            table.add(f"embed+norm {tokens}x{hidden}", times, moved, error=compare(calls[0]))


def embedded_then_normed(ids: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> Any:
    return rms_norm(F.embedding(ids, rows), weight, 1e-5)


def turns(table: Table) -> None:
    for half in (32, 64):
        frequencies = 1.0 / 5e5 ** (torch.arange(half, device="cuda") / half)
        for tokens in (1, 16, 64, 256, 4096, 16384):
            moved = tokens * (8.0 + 8 * half)
            count = copies(moved)
            many = [torch.randint(2**19, (tokens,), device="cuda") for _ in range(count)]
            calls = [partial(angles, positions, frequencies, 1.0) for positions in many]
            table.add(f"angles {tokens}x{half}", both(calls), moved, error=differing(calls[0]))


def inputs(table: Table) -> None:
    for width in (64, 512, 8192):
        pages = torch.randint(10_000, (257, width), device="cuda")
        computed = torch.randint(width * 64, (257,), device="cuda")
        for rows in (1, 16, 64, 256):
            slots = [torch.randperm(257, device="cuda")[:rows] for _ in range(8)]
            calls = [partial(decode_inputs, s, computed, computed, pages, 64) for s in slots]
            moved = rows * (16.0 * width + 64)
            wrong = differing(calls[0])
            table.add(f"inputs {rows} rows of {width} pages", both(calls), moved, error=wrong)


def finish(table: Table) -> None:
    state = torch.zeros(3, 257, dtype=torch.int64, device="cuda")
    for rows in (1, 16, 64, 256):
        live = torch.ones(rows, dtype=torch.int64, device="cuda")
        slots = [torch.randperm(257, device="cuda")[:rows] for _ in range(8)]
        calls = [partial(advance, s, live, s, s % 3 == 0, *state) for s in slots]
        table.add(f"finish {rows}", both(calls), rows * 97.0, error=differing(calls[0]))


PARTS = {
    "inputs": inputs,
    "angles": turns,
    "embed": embedding,
    "finish": finish,
    "norm": norm,
    "combine": combine,
    "silu": silu,
    "gqa": gqa,
    "mla": mla,
    "products": products,
    "gate": router,
    "align": alignment,
    "sample": sampling,
    "head": head,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    table = Table()
    with torch.inference_mode():
        for name in args.only.split(","):
            PARTS[name](table)
    table.write(args.out)


if __name__ == "__main__":
    main()
