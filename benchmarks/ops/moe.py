"""Routed experts on the card: error, time and limit, beside PyTorch's grouped GEMM and vLLM.

    python benchmarks/ops/moe.py [--shapes hy3,qwen3] [--tokens 1,64,16384] [--skew 1.5] [--sweep]
        [--out F]

Routing is uniform, or as skewed as `--skew` says: the deviation of the logarithm of an expert's
popularity, about 1.5 in a layer of hy3 with random weights and 0.25 in one of Moonlight. Every
call of a measured graph has a routing of its own, so that L2 holds little of what the next one
reads. "one role": the Triton kernel, where the Gluon one was used. The limit counts the weights of
experts touched, tokens in and out, and the FLOPs, at the card's measured ceilings. `--sweep` times
other tile shapes for each number of tokens and prints the best ones.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from timing import Table, attempt, relative_error

from baton.ops.activation import silu_mul
from baton.ops.triton import moe, moe_hopper
from baton.ops.triton.align import align
from baton.ops.triton.combine import Products
from baton.ops.triton.moe_tiles import Tiles, tiles_for

#: (routed experts, top k, shared experts, hidden, intermediate)
SHAPES = {
    "hy3": (192, 8, 1, 4096, 1536),
    "moonlight": (64, 6, 2, 2048, 1408),
    "qwen3": (128, 8, 0, 2048, 768),
}
TOKENS = "1,4,16,64,256,1024,4096,16384"


def vllm_experts() -> Callable[..., torch.Tensor] | None:
    """vLLM's fused experts, where it can be imported."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except Exception:
        return None
    return fused_experts


def reference(x, experts, weights, gate_up, down, tokens) -> torch.Tensor:
    rows = []
    for t in tokens:
        row = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for expert, weight in zip(experts[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            row += weight.double() * (down[expert].double() @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


class Case:
    """Weights of one shape, and inputs for one number of tokens."""

    def __init__(self, shape: tuple[int, int, int, int, int], skew: float = 0) -> None:
        self.skew = skew
        self.count, self.top_k, self.common, self.hidden, self.inner = shape
        make, total = {"device": "cuda", "dtype": torch.bfloat16}, self.count + self.common
        self.gate_up = torch.randn(total, 2 * self.inner, self.hidden, **make)
        self.gate_up.mul_(self.hidden**-0.5)
        self.down = torch.randn(total, self.hidden, self.inner, **make)
        self.down.mul_(self.inner**-0.5)

    def inputs(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        made = []
        for _ in range(8 if tokens <= 256 else 4 if tokens <= 1024 else 2):
            x = torch.randn(tokens, self.hidden, device="cuda", dtype=torch.bfloat16)
            popular = self.skew * torch.randn(self.count, device="cuda")
            # Gumbel noise: experts are drawn in proportion to popularity, none twice for a token.
            noise = torch.empty(tokens, self.count, device="cuda").exponential_().log_()
            experts = (popular - noise).topk(self.top_k, 1).indices
            weights = torch.rand(tokens, self.top_k, device="cuda") / self.top_k
            shared = torch.arange(self.count, self.count + self.common, device="cuda")
            experts = torch.cat((experts, shared.expand(tokens, -1)), 1)
            weights = torch.cat((weights, weights.new_ones(tokens, self.common)), 1)
            made.append((x, experts, weights))
        return made

    def cost(self, inputs: list[Any]) -> tuple[float, float]:
        """Bytes and FLOPs of one call."""
        touched = sum(len(experts.unique()) for _, experts, _ in inputs) / len(inputs)
        tokens = inputs[0][0].shape[0]
        weights = 6 * touched * self.hidden * self.inner
        flops = 6.0 * tokens * (self.top_k + self.common) * self.hidden * self.inner
        return weights + 4 * tokens * self.hidden, flops

    def calls(self, fn: Callable[..., torch.Tensor], inputs: list[Any]) -> list[Callable[[], Any]]:
        return [lambda i=i: fn(*i, self.gate_up, self.down) for i in inputs]

    def ours(self, x, experts, weights, gate_up, down) -> torch.Tensor:
        """All experts in the grouped GEMMs."""
        return moe.products(x, experts, weights, gate_up, down, None, self.common).sum()

    def grouped_mm(self, x, experts, weights, gate_up, down) -> torch.Tensor:
        """PyTorch's grouped GEMM: tokens are copied into expert order, SiLU is a kernel apart."""
        plan = align(experts, gate_up.shape[0], 1)
        rows = x.index_select(0, plan.rows.div(experts.shape[1], rounding_mode="floor"))
        middle = silu_mul(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=plan.ends))
        y = torch._grouped_mm(middle, down.transpose(1, 2), offs=plan.ends)
        return Products(y, weights, plan.place).sum()


def measure(table: Table, name: str, case: Case, tokens: int) -> None:
    inputs = case.inputs(tokens)
    x, experts, weights = inputs[0]
    out = case.ours(x, experts, weights, case.gate_up, case.down)
    some = sorted({0, tokens // 2, tokens - 1})
    want = reference(x, experts, weights, case.gate_up, case.down, some)
    wrong = relative_error(out[some], want)
    times: dict[str, float | str] = {"ours": attempt(case.calls(case.ours, inputs))}
    if moe_hopper.supports(x, case.count, case.top_k):
        with mock.patch.object(moe_hopper, "supports", return_value=False):
            times["one role"] = attempt(case.calls(case.ours, inputs))
    if tokens >= 256:
        times["grouped_mm"] = attempt(case.calls(case.grouped_mm, inputs))
    peer = vllm_experts()
    if peer is not None:

        def theirs(x, experts, weights, gate_up, down):
            return peer(x, gate_up, down, weights, experts.int())

        times["vllm"] = attempt(case.calls(theirs, inputs))
    table.add(f"{name} T={tokens}", times, *case.cost(inputs), error=wrong)


def candidates(tokens: int, case: Case, gated: bool) -> list[Tiles]:
    """Tile shapes around the chosen one that fit the shared memory."""
    base = tiles_for(tokens * case.top_k, case.count, gated, 2)
    widths = (64, 128) if gated or base.m < 64 else (128, 256)
    depths = ((64, 4), (64, 6), (128, 2), (128, 3))
    made = []
    for n, (k, stages), warps in itertools.product(widths, depths, (4, 8)):
        shared = (base.m + n * (2 if gated else 1)) * k * 2 * stages
        accumulators = base.m * n * (2 if gated else 1) // (32 * warps)
        if 48_000 <= shared <= 220_000 and accumulators <= 128 and (base.swap or n >= 128):
            made.append(replace(base, n=n, k=k, warps=warps, stages=stages))
    return made


def sweep(table: Table, name: str, case: Case, tokens: int) -> None:
    """Each GEMM's tiles varied alone, whole call timed."""
    inputs, chosen = case.inputs(tokens), moe.tiles_for
    for gated in (True, False):
        found: list[tuple[float, Tiles]] = []
        for tiles in candidates(tokens, case, gated):

            def pick(pairs, experts, gated, itemsize, side=gated, tiles=tiles):
                return tiles if gated == side else chosen(pairs, experts, gated, itemsize)

            moe.tiles_for = pick
            time = attempt(case.calls(case.ours, inputs), repeats=5)
            if not isinstance(time, str):
                found.append((time, tiles))
        moe.tiles_for = chosen
        base = attempt(case.calls(case.ours, inputs), repeats=5)
        part = "gate-up" if gated else "down"
        shown = base if isinstance(base, str) else f"{base * 1e6:.1f} us"
        print(f"sweep {name} T={tokens} {part}: the table's tiles {shown}")
        for time, tiles in sorted(found, key=lambda pair: pair[0])[:3]:
            print(f"    {time * 1e6:9.1f} us  {tiles}", flush=True)
            row = {"name": f"sweep {name} T={tokens} {part}", "us": time * 1e6}
            table.rows.append({**row, "tiles": str(tiles)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--skew", type=float, default=0)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    table = Table()
    with torch.inference_mode():
        for name in args.shapes.split(","):
            case = Case(SHAPES[name], args.skew)
            for tokens in map(int, args.tokens.split(",")):
                (sweep if args.sweep else measure)(table, name, case, tokens)
            del case
            torch.cuda.empty_cache()
    table.write(args.out)


if __name__ == "__main__":
    main()
