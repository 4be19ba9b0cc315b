"""`baton bench slo`: the load that still meets objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.cli.bench_flags import (
    NOT_MET,
    ResultFlags,
    ServerFlags,
    flags,
    length_buckets,
    positive_fraction,
    token_list,
)
from baton.cli.show import errors, examples, out, table
from baton.config.cli import parameters, section_of, with_parameters
from baton.core.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.report.document import Document, SearchSummary
    from baton.bench.slo.level import Goal
    from baton.bench.slo.run import Shape
    from baton.bench.slo.search import Plan

WORKLOAD = "Workload"


@dataclass(frozen=True)
class SearchFlags:
    """How the search goes."""

    vary: Annotated[
        Literal["rate", "concurrency"], "what is raised: requests per second, or in flight"
    ] = "rate"
    start: Annotated[float, "first load; it is doubled, or halved, from there"] = 1.0
    highest: Annotated[float, "no load above it is offered"] = 4096.0
    tolerance: Annotated[float, "the boundary is known when its ends are so close, as a share"] = (
        0.04
    )
    replicates: Annotated[int, "most runs at one load"] = 3
    stretch: Annotated[int, "a load's second and later runs send so many times the requests"] = 5
    most_runs: Annotated[int, "most runs of each shape"] = 60
    table: Annotated[bool, "the boundary of every objective too, not only that of all"] = True
    burstiness: Annotated[float, "gamma shape of the gaps: 1 is Poisson, below is burstier"] = 1.0

    def plan(self) -> Plan:
        """The plan; ConfigError names a flag that makes no sense."""
        from baton.bench.slo.search import Plan

        return Plan(**vars(self))


def register(group: typer.Typer) -> None:
    """Add the command."""
    made = with_parameters(_slo, *flags(load=False), parameters(SearchFlags, "Search"))
    group.command(
        "slo",
        epilog=examples(
            "baton bench slo --isl 4K --osl 256 --ttft 4s --tpot 50ms --attainment 0.95",
            "baton bench slo --buckets 1K:4,4K:2,16K:1 --ttft 4s --tpot 50ms --out mixed/",
            "baton bench slo --isl 1K,8K --vary concurrency --tpot 30ms --require 16",
            "baton bench slo --trace conversation_trace.jsonl --ttft 4s --out trace/ --resume",
        ),
    )(made)


def _slo(
    isl: Annotated[
        str,
        typer.Option(help="Prompt lengths, a search for each.", rich_help_panel=WORKLOAD),
    ] = "1K",
    osl: Annotated[
        str, typer.Option(help="Output lengths, a search for each.", rich_help_panel=WORKLOAD)
    ] = "128",
    buckets: Annotated[
        str | None,
        typer.Option(
            help="LENGTH:WEIGHT pairs of one mixed stream instead.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Trace file instead; its times are stretched.", rich_help_panel=WORKLOAD),
    ] = None,
    length_scale: Annotated[
        str, typer.Option(help="Scale of a trace's lengths.", rich_help_panel=WORKLOAD)
    ] = "1",
    requests: Annotated[
        int, typer.Option(help="Requests of a load's first run.", rich_help_panel=WORKLOAD)
    ] = 200,
    config: Annotated[
        str | None, typer.Option(help="Name of what is served; the model if unset.")
    ] = None,
    require: Annotated[
        float | None, typer.Option(help="Load that must be met, else exit with 3.")
    ] = None,
    **values: Any,
) -> None:
    """Find the highest load at which enough requests meet the objectives.

    Doubles the load until it fails, bisects, and measures again, longer, what is in doubt. Writes
    every run, summary.json, loads.csv and report.html into --out; --resume goes on after an
    interruption. Exits with 3 when no load meets the objectives, or less than --require.
    """
    result, server = section_of(ResultFlags, values), section_of(ServerFlags, values)
    goal, plan = _goal(result), section_of(SearchFlags, values).plan()
    folder = result.out or Path(f"slo-{datetime.now():%Y%m%d-%H%M%S}")
    if requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {requests}")
    if require is not None and not 0 < require < math.inf:
        raise ConfigError(f"--require must be a load above 0, got {require:g}")
    if trace is not None:
        shapes = [_trace_shape(trace, length_scale, requests, server)]
    elif buckets is not None:
        shapes = [_mixed_shape(buckets, osl, requests, server.seed)]
    else:
        shapes = _fixed_shapes(isl, osl, requests)
    try:
        made = _search(shapes, server, result, goal, plan, folder, config)
    except KeyboardInterrupt:
        errors.print(
            f"stopped; --out {folder} --resume goes on from here", style="yellow", markup=False
        )
        raise typer.Exit(130) from None
    show(made, result.json)
    errors.print(f"written to {folder}", style="dim", markup=False)
    least = require or 0.0
    met = all(s.capacity is not None and s.capacity >= least for s in made.searches)
    raise typer.Exit(0 if met else NOT_MET)


def _goal(result: ResultFlags) -> Goal:
    """What a load must meet; ConfigError names flags that make no sense in a search."""
    goal = result.goal()
    if goal is None:
        raise ConfigError("no objective: give at least one of --ttft, --tpot, --e2e")
    if result.steady:
        raise ConfigError("--steady is for single runs: a search counts every request")
    return goal


def _search(
    shapes: Sequence[Shape],
    server: ServerFlags,
    result: ResultFlags,
    goal: Goal,
    plan: Plan,
    folder: Path,
    config: str | None,
) -> Document:
    from baton.bench.load.server import ask_server
    from baton.bench.report.document import search_summary
    from baton.bench.report.subject import Subject, report, search_part
    from baton.bench.report.write import keep_others, write
    from baton.bench.runfile import make_folder
    from baton.bench.slo.run import search_server

    target = server.target()
    make_folder(folder)
    keep_others(folder, searches=[shape.name for shape in shapes])
    served = config or str(ask_server(target)["model"])
    searches: list[SearchSummary] = []
    for shape in shapes:
        place = shape.name.replace("/", "-") if len(shapes) > 1 else "."
        found = search_server(
            shape,
            target,
            goal,
            plan,
            errors,
            folder / place,
            resume=result.resume,
            workers=result.workers,
            pools=result.devices(),
        )
        searches.append(search_summary(found, served, shape.name, place))
        subject = Subject(served, [search_part(folder, search) for search in searches])
        made, shown = report([subject], _title(served, searches), goal)
        write(folder, made, shown)
    return made


def _title(served: str, searches: Sequence[SearchSummary]) -> str:
    return f"{served}: the load that meets its objectives, {', '.join(s.shape for s in searches)}"


def show(made: Document, as_json: bool = False) -> None:
    """Print the five loads of each search, and what must be known about them."""
    if as_json:
        from baton.bench.report.document import to_json

        print(to_json(made).decode(), end="")
        return
    for search in made.searches:
        _table(search)
        line = search.found.edges["all"]
        for note in [*([line.cliff] if line.cliff else []), *search.found.notes]:
            out.print(note, style="yellow", markup=False, highlight=False)


def _table(search: SearchSummary) -> None:
    from baton.bench.report.forms import show as form

    rows = []
    for row in search.five:
        doubt = ""
        if row.interval is not None:
            doubt = f" ({form(row.interval.low, 'share')} to {form(row.interval.high, 'share')})"
        rows.append(
            (
                row.label,
                f"{row.mark} {form(row.load, 'load')}".strip(),
                form(row.share, "share") + doubt,
                form(row.total, "rate"),
                form(row.ttft, "time"),
                form(row.tpot, "time"),
            )
        )
    found = search.found
    title = f"{search.config}, {search.shape}: {found.runs} runs of at most {found.most_runs}"
    heads = ("load", search.unit, "meets it", "tokens/s", "TTFT p95", "TPOT p95")
    table(title, heads, rows)


def _fixed_shapes(isl: str, osl: str, requests: int) -> list[Shape]:
    from baton.bench.slo.run import Shape
    from baton.bench.workload.shapes import fixed, label

    return [
        Shape(label(i, o), partial(fixed, i, o, warm=2), requests)
        for i in token_list("--isl", isl)
        for o in token_list("--osl", osl)
    ]


def _mixed_shape(buckets: str, osl: str, requests: int, seed: int) -> Shape:
    from baton.bench.slo.run import Shape
    from baton.bench.workload.shapes import mixed, short

    weights = length_buckets(buckets)
    mean, *others = token_list("--osl", osl)
    if others:
        raise ConfigError(f"--osl {osl!r}: a mixed stream has one mean output length")
    name = f"mixed {short(min(weights))} to {short(max(weights))}"
    return Shape(name, lambda count: mixed(weights, mean, count, seed), requests)


def _trace_shape(trace: str, scale: str, requests: int, server: ServerFlags) -> Shape:
    from baton.bench.load.server import ask_server
    from baton.bench.slo.run import Shape
    from baton.bench.workload.job import Workload
    from baton.bench.workload.replay import Scales, replay
    from baton.bench.workload.trace import read_trace

    jobs = read_trace(trace, None)
    length = positive_fraction("--length-scale", scale)
    most = ask_server(server.target()).get("max_model_len")

    def make(count: int) -> Workload:
        loops = -(-count // len(jobs))
        scales = Scales(length=length, output=length, loops=loops, max_tokens=most)
        return replay(jobs[:count], scales, trace)

    return Shape(Path(trace).stem, make, requests)
