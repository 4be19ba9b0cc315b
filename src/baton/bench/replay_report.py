"""A replay's results as numbers (JSON) and as a table that fits 100 columns."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.bench.replay import Result

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Gap between stream events",
    "e2e": "Whole request",
}


@dataclass(frozen=True)
class Summary:
    """Numbers of one replay: times in seconds, rates per second. JSON through `to_json`.

    prefix_hit: cached over all prompt tokens of requests whose server reported it, or None.
    exact_tokens: False when some servers sent no usage and stream events were counted instead.
    late: seconds between due and sent, at the 99th percentile (the client's own delay).
    """

    requests: int
    failed: int
    failures: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    exact_tokens: bool
    prefix_hit: float | None
    cached_tokens: int | None
    late: float
    latency: dict[str, dict[str, float]]

    @property
    def rates(self) -> dict[str, float]:
        """Finished requests, their prompt tokens and output tokens, each per second."""
        done = {
            "requests": self.requests - self.failed,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        return {name: value / self.seconds if self.seconds else 0.0 for name, value in done.items()}


def summarize(results: Sequence[Result]) -> Summary:
    """Statistics over the requests that were answered; failures are counted by their reason."""
    good = [r for r in results if r.error is None]
    told = [r for r in good if r.cached_tokens is not None]
    looked_up = sum(r.prompt_tokens for r in told)
    cached = sum(r.cached_tokens or 0 for r in told)
    samples = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.gaps],
        "e2e": [r.end - r.due for r in good],
    }
    return Summary(
        requests=len(results),
        failed=len(results) - len(good),
        failures=dict(Counter(r.error for r in results if r.error is not None).most_common()),
        seconds=max((r.end for r in results), default=0.0),
        prompt_tokens=sum(r.prompt_tokens for r in good),
        output_tokens=sum(r.tokens for r in good),
        exact_tokens=all(r.output_tokens is not None for r in good),
        prefix_hit=cached / looked_up if looked_up else None,
        cached_tokens=cached if told else None,
        late=float(np.percentile([r.sent - r.due for r in results], 99)) if results else 0.0,
        latency={name: _spread(values) for name, values in samples.items() if values},
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    spread = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **spread, "max": max(values)}


def to_json(summary: Summary, results: Sequence[Result], about: dict[str, Any]) -> str:
    """Everything a reader needs to judge or repeat the run, each request included."""
    document = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "client": {
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
        **about,
        "summary": {**vars(summary), "rates": summary.rates},
        "requests": [_row(r) for r in results],
    }
    return json.dumps(document, indent=1)


def _row(result: Result) -> dict[str, Any]:
    answered = bool(result.arrivals)
    return {
        "due": round(result.due, 4),
        "sent": round(result.sent, 4),
        "ttft": round(result.ttft, 4) if answered else None,
        "end": round(result.end, 4),
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.tokens,
        "cached_tokens": result.cached_tokens,
        "finish_reason": result.finish_reason,
        "error": result.error,
    }


def write_json(
    path: Path, summary: Summary, results: Sequence[Result], about: dict[str, Any]
) -> None:
    """Write `to_json` to a file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(summary, results, about) + "\n", encoding="utf-8")


def table(summary: Summary, title: str) -> RenderableType:
    """Latencies, totals and failures for people."""
    latency = Table(title=title, title_justify="left", title_style="bold")
    latency.add_column("milliseconds")
    for head in ("mean", *(f"p{p}" for p in PERCENTILES), "max"):
        latency.add_column(head, justify="right")
    for name, values in summary.latency.items():
        cells = [f"{value * 1000:,.1f}" for value in values.values()]
        latency.add_row(f"{LATENCIES[name]} ({name.upper()})", *cells)
    totals = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in _totals(summary):
        totals.add_row(label, value)
    lines = [
        Text(f"  {count} x {reason}", style="red", overflow="fold")
        for reason, count in list(summary.failures.items())[:5]
    ]
    if len(summary.failures) > 5:
        lines.append(Text(f"  and {len(summary.failures) - 5} other reasons", style="red"))
    return Group(latency, totals, *lines) if summary.latency else Group(totals, *lines)


def _totals(summary: Summary) -> list[tuple[str, str]]:
    rates = summary.rates
    done = summary.requests - summary.failed
    counted = "" if summary.exact_tokens else " (counted by stream events: no usage was sent)"
    hit = "not reported by the server"
    if summary.prefix_hit is not None:
        hit = f"{summary.prefix_hit:.1%} of prompt tokens ({summary.cached_tokens:,} cached)"
    return [
        ("Requests", f"{done} answered, {summary.failed} failed in {summary.seconds:.1f} s"),
        ("Throughput", f"{rates['requests']:.2f} requests/s"),
        ("Prompt", f"{summary.prompt_tokens:,} tokens, {rates['prompt_tokens']:,.1f} tokens/s"),
        (
            "Output",
            f"{summary.output_tokens:,} tokens, {rates['output_tokens']:,.1f} tokens/s{counted}",
        ),
        ("Prefix hit", hit),
        ("Sent late", f"{summary.late * 1000:.1f} ms after due at p99 (client side)"),
    ]
