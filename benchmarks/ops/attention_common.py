"""Shapes, timing and reporting that the attention benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from baton.attention.spec import GQASpec, MLASpec
from baton.core.forward import ForwardBatch
from baton.kv.format import make_views

BANDWIDTH, FLOPS = 4.25e12, 660e12
PAGE, K = 64, 1024
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
HY3 = GQASpec(64, 8, 128, 128**-0.5)
HY3_TP8 = GQASpec(8, 1, 128, 128**-0.5)
MOONLIGHT = MLASpec(16, 512, 128, 64, 128, 192**-0.5)
results: list[dict[str, Any]] = []


def report(what: str, shape: str, name: str, ms: float, limit_ms: float, **more: Any) -> None:
    row = {"what": what, "shape": shape, "name": name, "ms": ms, "limit_ms": limit_ms, **more}
    results.append(row)
    extra = "  ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in more.items()
    )
    part = limit_ms / ms if ms else float("nan")
    print(f"{what:12} {shape:14} {name:18} {ms:9.4f} ms  {part:6.1%} of limit  {extra}", flush=True)


def failed(what: str, shape: str, name: str, error: Exception) -> None:
    text = str(error).strip().split("\n")[0][:160]
    results.append({"what": what, "shape": shape, "name": name, "error": text})
    print(f"{what:12} {shape:14} {name:18} failed: {type(error).__name__}: {text}", flush=True)


def graph_ms(calls: list[Callable[[], Any]], repeats: int = 20) -> float:
    """Milliseconds of one call, from replays of a graph that makes them all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_ms(graph.replay, repeats, 3) / len(calls)


def event_ms(call: Callable[[], Any], repeats: int, warm: int = 1) -> float:
    for _ in range(warm):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def sets_for(size: int) -> int:
    """Layers to walk over so that 300 MB pass between two visits, 48 at most."""
    return max(1, min(48, 300_000_000 // size))


def layers(spec: GQASpec | MLASpec, num_pages: int, count: int) -> list[Any]:
    views = make_views([spec.kv_shape] * count, num_pages, PAGE, "bfloat16", BF16, CUDA)
    for view in views:
        for part in view.paged() or ():
            part.normal_()
    return views


def rows_of(view: Any, batch: ForwardBatch, i: int, which: int = 0) -> torch.Tensor:
    """All tokens of sequence i, `[len, heads, dim]` float32."""
    length = batch.context_lens[i] + 1
    found = view.paged()[which][batch.pages[i, : -(-length // PAGE)]]
    return found.flatten(0, 1)[:length].float()
