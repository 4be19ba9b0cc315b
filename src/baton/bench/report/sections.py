"""The sections of a report, from the document and its runs' records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from baton.bench.record import Run
from baton.bench.report import figures
from baton.bench.report.document import Document, RunSummary, load_text
from baton.bench.report.forms import DIFFERENCE, NONE
from baton.bench.report.searched import goal_text, search_answer
from baton.bench.report.words import Numbers, facts, paragraph, pointer, table
from baton.bench.slo.level import ALL

LATENCY = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL by chunk",
    "itl_token": "ITL by token",
    "e2e": "E2E",
    "queue": "Client queue",
}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
RATES = {
    "requests": "requests/s",
    "input": "input tokens/s",
    "computed_input": "computed input tokens/s",
    "output": "output tokens/s",
    "total": "total tokens/s",
}
HITS = {
    "token": "by token",
    "block": "by block",
    "request": "by request",
    "mean_request": "mean of requests",
    "ideal": "endless cache",
}
#: runs that are drawn; colours are no more
MOST = 6


def titled(run: RunSummary) -> str:
    """A run's name and its load, unless the name has it."""
    load = load_text(run.load)
    title = run.name if load in run.name else f"{run.name}, {load}"
    if run.window is None:
        return title
    return f"{title}, requests due from {run.window[0]:.1f} to {run.window[1]:.1f} s"


def answers(made: Document, write: Numbers) -> str:
    """What was found, first."""
    parts = [search_answer(s, i, write) for i, s in enumerate(made.searches)]
    if not made.searches and made.goal is not None:
        parts += [_run_answer(made, i, write) for i in range(len(made.runs))]
    return "".join(parts)


def _run_answer(made: Document, i: int, write: Numbers) -> str:
    run, goal = made.runs[i], made.goal
    share = run.metrics["attainment"]["all"]
    if goal is None or share is None:
        return ""
    met = share >= goal.attainment
    path = f"/runs/{i}"
    word = "meets" if met else "misses"
    return (
        f'<div class="answer{"" if met else " missed"}">'
        f'<p class="big">{write.write(f"{path}/metrics/attainment/all", "share")}</p>'
        f"<p>of {write.write(f'{path}/metrics/requests/sent', 'count')} requests sent by "
        f"{escape(run.name)} ({escape(load_text(run.load))}) met every objective: it {word} "
        f"{goal_text(goal)}.</p></div>"
    )


def latency(made: Document, runs: Sequence[Run], write: Numbers) -> str:
    """Distributions of all runs together, then a table for each."""
    drawn, told = runs[:MOST], made.runs[:MOST]
    plots = [figures.distribution(drawn, told, kind, made.goal) for kind in figures.NAMES]
    shown = "".join(plot.html() for plot in plots if plot is not None)
    parts = [_cut(made), f'<div class="plots">{shown}</div>']
    few = False
    for i, run in enumerate(made.runs):
        rows = []
        for kind, label in LATENCY.items():
            spread = run.metrics["latency"][kind]
            if spread["n"]:
                rows.append([label, *(_percentile(i, kind, c, spread, write) for c in COLUMNS)])
                few = few or bool(spread["too_few"])
        title = f"{titled(run)}: answered requests"
        parts.append(table(["", *COLUMNS], rows, caption=title))
    if few:
        parts.append(
            paragraph(
                "ⁿ n too small: fewer than ten samples lie beyond this percentile, so it says "
                "little more than the maximum does.",
                "soft",
            )
        )
    return "".join(parts)


def _cut(made: Document) -> str:
    if len(made.runs) <= MOST:
        return ""
    return paragraph(f"Drawn are the first {MOST} of {len(made.runs)} runs.", "soft")


def _percentile(i: int, kind: str, column: str, spread: dict[str, object], write: Numbers) -> str:
    told = write.write(f"/runs/{i}/metrics/latency/{kind}/{column}", "time")
    too_few = spread["too_few"]
    if isinstance(too_few, list) and column in too_few:
        told = f'<span class="few" title="n too small">{told}</span>'
    return told + write.interval(f"/runs/{i}/intervals/{kind}/{column}", "time")


def timelines(made: Document, runs: Sequence[Run]) -> str:
    """Requests in flight and TTFT over time, for each run."""
    parts = [_cut(made)]
    for i, (run, summary) in enumerate(zip(runs[:MOST], made.runs[:MOST], strict=True)):
        plots = "".join(plot.html() for plot in figures.timeline(run, i, made.goal))
        parts.append(f'<h3>{escape(titled(summary))}</h3><div class="plots wide">{plots}</div>')
    return "".join(parts)


def rates(made: Document, write: Numbers) -> str:
    """Requests, tokens, hits, failures: a column for each run."""
    heads = ["", *(run.name for run in made.runs)]
    each = range(len(made.runs))

    def rows(group: str, names: dict[str, str], form: str, ends: str = "") -> list[list[str]]:
        told = []
        for name, label in names.items():
            cells = [write.write(f"/runs/{i}/metrics/{group}/{name}", form) for i in each]
            if any(cell != NONE for cell in cells):
                doubts = [
                    write.interval(f"/runs/{i}/{ends}/{name}", form) if ends else "" for i in each
                ]
                told.append([label, *map(str.__add__, cells, doubts)])
        return told

    requests = {n: n for n in ("sent", "ok", "errors", "timeouts", "cancelled")}
    met = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", ALL: "all objectives"}
    good = {"requests": "good requests/s", "output_tokens": "good output tokens/s"}
    busy = {"mean": "in flight, mean", "most": "in flight, most"}
    parts = {
        "Requests": rows("requests", requests, "count"),
        "Share of sent requests within objectives": rows("attainment", met, "share", "attainment"),
        "Throughput": rows("throughput", RATES, "rate")
        + rows("per_device", _names(made, "per_device"), "rate")
        + rows("goodput", good, "rate")
        + rows("in_flight", busy, "rate"),
        "Prefix cache hits": rows("hit", HITS, "share"),
    }
    lines = [line for title, told in parts.items() if told for line in ([title], *told)]
    return table(heads, lines, kind="snug") + _failures(made)


def _names(made: Document, group: str) -> dict[str, str]:
    """Names of a group's figures that differ from run to run."""
    return {
        name: name.replace("_", " ") + " tokens/s, per device"
        for run in made.runs
        for name in run.metrics[group]
    }


def _failures(made: Document) -> str:
    parts = []
    for run in made.runs:
        reasons = run.metrics["requests"]["failures"]
        if reasons:
            rows = [[escape(reason), str(count)] for reason, count in reasons.items()]
            parts.append(table(["reason", "requests"], rows, caption=f"{run.name}: failures"))
    return "".join(parts)


def groups(made: Document, write: Numbers) -> str:
    """Each group's share, latencies and rates, for runs that have groups."""
    parts = []
    heads = ["group", "sent", "meets all", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "hit"]
    for i, run in enumerate(made.runs):
        rows = []
        for name in sorted(run.groups, key=_natural):
            path = f"/runs/{i}/groups/{pointer(name)}"
            rows.append(
                [
                    escape(name) or NONE,
                    write.write(f"{path}/requests/sent", "count"),
                    write.write(f"{path}/attainment/all", "share"),
                    *(
                        write.write(f"{path}/latency/{kind}/{p}", "time")
                        for kind in ("ttft", "tpot")
                        for p in ("p50", "p95")
                    ),
                    write.write(f"{path}/hit/token", "share"),
                ]
            )
        if rows:
            parts.append(table(heads, rows, caption=titled(run)))
    return "".join(parts)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts 4K before 16K."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def differences(made: Document, write: Numbers) -> str:
    """Each comparison as a table."""
    parts = []
    for i, pair in enumerate(made.comparisons):
        base, other = made.runs[pair.base].name, made.runs[pair.other].name
        rows = []
        for k, row in enumerate(pair.rows):
            path, form = f"/comparisons/{i}/rows/{k}", DIFFERENCE[row.form]
            kind = {"better": "met", "worse": "missed-word"}.get(row.verdict, "soft")
            rows.append(
                [
                    escape(row.label),
                    f"{write.write(f'{path}/difference', form)} "
                    f'<span class="soft">{write.write(f"{path}/relative", "percent")}</span>'
                    + write.interval(f"{path}/interval", form),
                    f'<span class="verdict {kind}">{row.verdict or "no interval"}</span>',
                    write.write(f"{path}/other", row.form),
                    write.write(f"{path}/base", row.form),
                ]
            )
        heads = ["", "difference", "verdict", other, base]
        parts.append(f"<h3>{escape(other)}, less {escape(base)}</h3>{table(heads, rows)}")
    return "".join(parts)


def setting(made: Document) -> str:
    """What was measured, with what, a column for each run."""
    return facts(
        [
            (
                run.name,
                {
                    "started": moment(run.started),
                    "load": load_text(run.load),
                    "server": run.server,
                    "workload": run.workload,
                    "client": run.client,
                },
            )
            for run in made.runs
        ]
    )


def moment(text: str) -> str:
    """An ISO time as people write it: "2030-01-02 03:04 UTC"."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def definitions(made: Document) -> str:
    """What each figure is."""
    items = "".join(
        f"<div><dt>{escape(_defined(name))}</dt><dd>{escape(text)}</dd></div>"
        for name, text in made.definitions.items()
    )
    return f"<dl>{items}</dl>"


def _defined(name: str) -> str:
    words = name.replace("hit_", "prefix_hit_by_").replace("_", " ")
    return LATENCY.get(name) or words.capitalize()
