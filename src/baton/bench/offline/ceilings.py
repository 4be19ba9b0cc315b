"""Hardware ceilings of the device at hand: known figures, or a quick measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from baton.bench.offline.account import H200, Hardware
from baton.config.engine import Machine

KNOWN = {H200.name: H200}
_SECONDS = 0.15  # for each of the two measurements


def hardware(
    machine: Machine,
    dtype: str,
    *,
    copy: float | None = None,
    matmul: float | None = None,
    attention: float | None = None,
) -> tuple[Hardware, str]:
    """Ceilings, and where they come from: "known" or "measured", or "given" by the user.

    Args:
        machine: the device.
        dtype: of the matrix products.
        copy: TB/s, given by the user; None to look up or measure.
        matmul: TFLOP/s, likewise.
        attention: TFLOP/s, likewise. Attention is not measured: where it is neither known nor
            given it may run as fast as `matmul`.
    """
    said = {"copy": copy, "matmul": matmul, "attention": attention}
    given = {name: value for name, value in said.items() if value is not None}
    if machine.device_name in KNOWN and dtype in ("bfloat16", "float16"):
        found, source = KNOWN[machine.device_name], "known"
    elif copy is None or matmul is None:
        found = Hardware(machine.device_name, *measure(machine.device, dtype), attention=0.0)
        source = "measured"
    else:
        found, source = Hardware(machine.device_name, copy, matmul, attention=0.0), "given"
    if given and source != "given":
        source += f", {' and '.join(given)} given"
    matmul = matmul or found.matmul
    attention = attention or found.attention or matmul
    return Hardware(found.name, copy or found.copy, matmul, attention), source


def measure(device: str, dtype: str) -> tuple[float, float]:
    """`(copy TB/s, matmul TFLOP/s)`, medians of a fraction of a second each."""
    import torch

    gpu = device == "cuda"
    size, edge = (2**28, 4096) if gpu else (2**26, 1024)
    kind: torch.dtype = getattr(torch, dtype)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(edge, edge, dtype=kind, device=device)
    out = torch.empty_like(a)
    wait = torch.cuda.synchronize if gpu else _nothing
    copying = _median(lambda: target.copy_(source), wait)
    multiplying = _median(lambda: torch.mm(a, a, out=out), wait)
    return 2 * size / copying / 1e12, 2 * edge**3 / multiplying / 1e12


def _median(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of one call, after two that warm up."""
    work()
    work()
    wait()
    times: list[float] = []
    while sum(times) < _SECONDS or len(times) < 3:
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _nothing() -> None:
    """What there is to wait for on a CPU."""
