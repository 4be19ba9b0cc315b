"""The numbers of load runs as tables that fit 100 columns, with their definitions below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.bench.metrics import DEFINITIONS, Metrics
from baton.bench.record import Run

LATENCIES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Gap by chunk (ITL)",
    "itl_token": "Gap by token",
    "e2e": "End to end (E2E)",
    "queue": "Client queue",
}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
HITS = {"token": "by token", "block": "by block", "request": "by request"}
#: reasons shown of failures
REASONS = 5


def run_table(run: Run, found: Metrics, title: str) -> RenderableType:
    """One run in full: latencies, totals, failures, and why it is invalid if it is."""
    totals = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in _totals(run, found):
        totals.add_row(label, value)
    head = _latencies(found, title) if found["requests"]["ok"] else Text(title, style="bold")
    parts: list[RenderableType] = [head, totals]
    return Group(*parts, *failures(found), *problems(run))


def _latencies(found: Metrics, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("milliseconds")
    for head in COLUMNS:
        table.add_column(head, justify="right")
    for name, label in LATENCIES.items():
        spread = found["latency"][name]
        if spread["n"]:
            table.add_row(label, *(_ms(spread, head) for head in COLUMNS))
    return table


def _ms(spread: Mapping[str, Any], name: str) -> str:
    value = spread[name]
    if value is None:
        return "-"
    # a percentile with too few samples beyond it is marked
    return f"{_number(value * 1000)}{'?' if name in spread['too_few'] else ''}"


def _number(value: float) -> str:
    """Four digits or more, in little room."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _totals(run: Run, found: Metrics) -> list[tuple[str, str]]:
    requests, tokens, rates = found["requests"], found["tokens"], found["throughput"]
    failed = requests["sent"] - requests["ok"]
    counted = "" if tokens["exact_output"] else ", counted by stream events: no usage was sent"
    asked = "" if tokens["exact_input"] else ", as asked: the server did not count them"
    rows = [
        ("Requests", f"{requests['ok']} answered, {failed} failed in {found['seconds']:.1f} s"),
        (
            "Throughput",
            f"{rates['requests']:.2f} requests/s; in flight {found['in_flight']['mean']:.1f} on "
            f"average, {found['in_flight']['most']} at most",
        ),
        ("Input", f"{tokens['input']:,} tokens, {rates['input']:,.1f}/s{asked}"),
    ]
    if tokens["computed"] is not None:
        text = f"{tokens['computed']:,} tokens, {rates['computed_input']:,.1f}/s"
        rows.append(("  computed", text))
    rows.append(("Output", f"{tokens['output']:,} tokens, {rates['output']:,.1f}/s{counted}"))
    rows.append(("Prefix hit", _hit(found["hit"])))
    rows += _objectives(found)
    for name, rate in found["per_device"].items():
        if rate is not None:
            rows.append((f"Per {name.partition('_')[0]} device", f"{rate:,.1f} {name} tokens/s"))
    rows.append(("Client lag", _lag(run)))
    return rows


def _hit(hit: Mapping[str, float | None]) -> str:
    told = [f"{hit[name]:.1%} {label}" for name, label in HITS.items() if hit[name] is not None]
    ideal = f"an endless cache: {hit['ideal']:.1%}" if hit["ideal"] is not None else ""
    return "; ".join([", ".join(told) or "not reported by the server", *([ideal] * bool(ideal))])


def _objectives(found: Metrics) -> list[tuple[str, str]]:
    attainment, goodput = found["attainment"], found["goodput"]
    if attainment["all"] is None:
        return []
    each = ", ".join(
        f"{name.upper()} {share:.1%}"
        for name, share in attainment.items()
        if share is not None and name != "all"
    )
    good = f"{goodput['requests']:.2f} requests/s, {goodput['output_tokens']:,.1f} output tokens/s"
    return [
        ("Attainment", f"{attainment['all']:.1%} of requests met all objectives ({each})"),
        ("Goodput", good),
    ]


def _lag(run: Run) -> str:
    lag = run.client.get("lag")
    if not lag:
        return "not known"
    shown = [
        f"{label} {lag[name]['p95'] * 1000:.1f} ms"
        for name, label in (("send", "sends"), ("loop", "event loop"))
        if lag[name]["p95"] is not None
    ]
    return f"{', '.join(shown)} at p95" if shown else "not known"


def failures(found: Metrics) -> list[Text]:
    """The most frequent reasons of failures, a line each."""
    reasons = list(found["requests"]["failures"].items())
    lines = [
        Text(f"  {count} x {reason}", style="red", overflow="fold")
        for reason, count in reasons[:REASONS]
    ]
    if len(reasons) > REASONS:
        lines.append(Text(f"  and {len(reasons) - REASONS} other reasons", style="red"))
    return lines


def problems(run: Run) -> list[Text]:
    """Why a run's figures are worth nothing, a line each."""
    return [Text(f"INVALID: {reason}", style="bold red", overflow="fold") for reason in run.invalid]


def rows_table(rows: Mapping[str, Metrics], title: str, head: str) -> Table:
    """One line for each of several runs or groups."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(head, no_wrap=True, overflow="ellipsis")
    hits = any(found["hit"]["token"] is not None for found in rows.values())
    heads = ("ok/sent", "req/s", "in/s", "out/s", "TTFT p50", "p99", "TPOT p50", "p99")
    for name in (*heads, "hit") if hits else heads:
        table.add_column(name, justify="right")
    for name, found in rows.items():
        cells = _cells(found)
        table.add_row(name, *(cells if hits else cells[:-1]))
    return table


def _cells(found: Metrics) -> list[str]:
    requests, rates, latency = found["requests"], found["throughput"], found["latency"]
    hit = found["hit"]["token"]
    return [
        f"{requests['ok']}/{requests['sent']}",
        f"{rates['requests']:.2f}",
        _number(rates["input"]),
        _number(rates["output"]),
        *(_ms(latency[name], p) for name in ("ttft", "tpot") for p in ("p50", "p99")),
        "-" if hit is None else f"{hit:.1%}",
    ]


def definitions(names: Sequence[str] = tuple(DEFINITIONS)) -> Text:
    """What the numbers mean."""
    lines = [f"{name}: {DEFINITIONS[name]}" for name in names]
    note = "A figure marked ? is a percentile with fewer than ten samples beyond it."
    return Text("\n".join([*lines, note]), style="dim")
