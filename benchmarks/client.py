"""How exactly `baton bench` measures: a stub with known delays, at 1, 100 and 2,000 streams, and
with bodies of 512K tokens.

    python benchmarks/client.py [--out client.json]

The stub notes when it wrote what, on the clock that the client reads too. "stub" is what it did,
"planned" what its profile says, "client" what the client reports, "off" the difference between
client and stub. It fails above 1% or 2 ms, for means, medians and 90th percentiles that have ten
samples beyond them; 99th percentiles are shown, and tell as much of the machine as of the client.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from baton.bench.about import commit
from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import metrics
from baton.bench.record import Load
from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Curve, Profile
from baton.bench.workload.job import Job, Workload

JUDGED = ("mean", "p50", "p90")


@dataclass(frozen=True)
class Case:
    """Requests of one shape; `rate` opens the loop. Times in seconds."""

    name: str
    load: Load
    count: int
    isl: int
    osl: int
    ttft: float
    itl: float


CASES = (
    Case("1 stream", Load(kind="closed", concurrency=1), 100, 1000, 6, 0.1, 0.02),
    Case("100 streams", Load(rate=80.0, burstiness=1e6), 800, 1000, 50, 0.25, 0.02),
    # 600 a second, each 3.3 s on its way
    Case("2,000 streams", Load(rate=600.0, burstiness=1e6), 9000, 200, 12, 1.1, 0.2),
    Case("512K bodies", Load(kind="closed", concurrency=2), 20, 512 * 1024, 10, 1.0, 0.05),
)


def main() -> int:
    """Print a table for each case; the exit code is 1 when a judged figure is off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also write JSON here")
    out = parser.parse_args().out
    busy = os.getloadavg()[0]
    results = [measure(case) for case in CASES]
    if out is not None:
        about = {
            "commit": commit(),
            "cores": os.cpu_count(),
            "load_before": busy,
            "python": platform.python_version(),
        }
        out.write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")
    return int(any(result["off"] for result in results))


def measure(case: Case) -> dict[str, object]:
    """One case: rows of metric, percentile, planned, stub, client in milliseconds."""
    profile = Profile(ttft=Curve(base=case.ttft), itl=Curve(base=case.itl))
    jobs = [Job(((i, case.isl),), case.osl) for i in range(case.count)]
    with stub_server(profile) as url:
        run = run_load(Workload(jobs, {"name": case.name}), case.load, Target(url))
        answers = np.array(httpx.get(f"{url}/stats", timeout=60).json()["answers"])
    found = metrics(run)
    first = answers[:, 1] - answers[:, 0]
    each = (answers[:, 2] - answers[:, 1]) / (case.osl - 1)
    did = {
        "ttft": (case.ttft, first),
        "tpot": (case.itl, each),
        "e2e": (case.ttft + case.itl * (case.osl - 1), answers[:, 2] - answers[:, 0]),
    }
    lag, most = run.client["lag"], found["in_flight"]["most"]
    print(f"\n{case.name}: {found['requests']['ok']}/{case.count} answered, at most {most} at once")
    print(
        f"lag p95: loop {lag['loop']['p95'] * 1e3:.2f} ms, sends {lag['send']['p95'] * 1e3:.2f} ms"
    )
    print(f"{'ms':<12}{'planned':>10}{'stub':>10}{'client':>10}{'off':>8}")
    rows, off = [], []
    for metric, (planned, samples) in did.items():
        for name in (*JUDGED, "p99"):
            truth = samples.mean() if name == "mean" else np.percentile(samples, int(name[1:]))
            measured = found["latency"][metric][name]
            error = measured - truth
            judged = name in JUDGED and name not in found["latency"][metric]["too_few"]
            bad = judged and abs(error) > max(0.01 * truth, 0.002)
            rows.append([metric, name, planned, truth, measured])
            off += [f"{metric} {name}"] if bad else []
            cells = "".join(f"{value * 1e3:>10.2f}" for value in (planned, truth, measured))
            print(f"{metric} {name:<7}{cells}{error * 1e3:>8.2f}{' OFF' if bad else ''}")
    itl = found["latency"]["itl"]
    print("itl (client alone): " + ", ".join(f"{p} {itl[p] * 1e3:.2f}" for p in (*JUDGED, "p99")))
    tokens = found["tokens"]
    exact = tokens["output"] == case.count * case.osl and tokens["input"] == case.count * case.isl
    off += [] if exact else ["tokens"]
    return {"case": case.name, "most": most, "lag": lag, "rows": rows, "itl": itl, "off": off}


if __name__ == "__main__":
    sys.exit(main())
