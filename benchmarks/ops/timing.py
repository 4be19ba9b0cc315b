"""Timing on the card: graphs of several calls, so that launches cost nothing and caches do not
help; and a table with the limit beside each time."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baton.ops import dispatch

BYTES_PER_S = 4.25e12  # copy, read and written, measured on the H200
FLOPS = 686e12  # BF16 matrix product, 8192 cube, measured on the H200

Call = Callable[[], Any]


@contextmanager
def plain() -> Iterator[None]:
    """Public operations take their plain PyTorch path, on the GPU."""
    kept = dispatch.has_triton
    dispatch.has_triton = lambda: False
    try:
        yield
    finally:
        dispatch.has_triton = kept


def seconds(calls: Sequence[Call], repeats: int = 15) -> float:
    """Median seconds of one call: all are captured in one graph, which is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / 1000 / len(calls))
    del graph
    return statistics.median(times)


def attempt(calls: Sequence[Call], repeats: int = 15) -> float | str:
    """`seconds`, or in a few words why not."""
    try:
        return seconds(calls, repeats)
    except Exception as error:  # a peer that cannot be captured must not end the run
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:80]}"


class Table:
    """Rows printed as they come, and written at the end with what they were measured on."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        times: dict[str, float | str],
        moved: float,
        flops: float = 0.0,
        error: float | None = None,
    ) -> None:
        """`times` by variant, ours first; `moved` bytes and `flops` give the limit."""
        limit = max(moved / BYTES_PER_S, flops / FLOPS)
        row: dict[str, Any] = {"name": name, "limit_us": limit * 1e6, "error": error}
        text = f"{name:<34} limit {limit * 1e6:9.1f} us"
        for variant, time in times.items():
            if isinstance(time, str):
                row[variant] = time
                text += f" | {variant}: {time}"
                continue
            rate = f"{flops / time / 1e12:.0f} TF" if flops / FLOPS >= moved / BYTES_PER_S else ""
            rate = rate or f"{moved / time / 1e12:.2f} TB/s"
            row[variant] = time * 1e6
            text += f" | {variant} {time * 1e6:9.1f} us {limit / time:4.0%} {rate}"
        if error is not None:
            text += f" | error {error:.1e}"
        print(text, flush=True)
        self.rows.append(row)

    def write(self, path: str | None) -> None:
        """JSON, with device, versions and commit."""
        if path is None:
            return
        import triton

        try:
            said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True)
            commit = said.stdout.decode().strip()
        except OSError:
            commit = ""
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit,
            "rows": self.rows,
        }
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm, in float64."""
    return float((out.double() - want.double()).norm() / want.double().norm())
