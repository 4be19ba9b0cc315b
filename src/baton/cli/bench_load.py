"""`baton bench run|grid|mixed|prefix|replay|session|synth`: load on an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.bench_flags import (
    LoadFlags,
    ServerFlags,
    flags,
    length_buckets,
    positive_fraction,
    run_points,
    token_list,
    tokens,
)
from baton.cli.show import errors, examples
from baton.config.cli import section_of, with_parameters
from baton.core.errors import ConfigError

PANEL = "Workload"
#: requests per second where nothing says otherwise
RATE = 1.0
SYNTHETIC = "synthetic"


def register(group: typer.Typer) -> None:
    """Add the commands."""
    for name, command, load, lines in (
        (
            "run",
            _run,
            True,
            (
                "baton bench run --isl 1K --osl 128 --rate 2 --requests 100",
                "baton bench run --isl 4K --osl 256 --concurrency 8 --ttft 4s --tpot 50ms",
            ),
        ),
        ("grid", _grid, False, ("baton bench grid --isl 1K,4K --osl 128 --concurrency 1,4,16",)),
        ("mixed", _mixed, True, ("baton bench mixed --buckets 1K:4,4K:2,16K:1 --requests 100",)),
        (
            "prefix",
            _prefix,
            True,
            ("baton bench prefix --lengths 512,1K --page 16 --concurrency 2 --out prefix/",),
        ),
        (
            "replay",
            _replay,
            True,
            (
                "baton bench replay synthetic --requests 50 --length-scale 1/64",
                "baton bench replay conversation_trace.jsonl --time-scale 2 --out conversation/",
            ),
        ),
        ("session", _session, True, ("baton bench session --sessions 8 --turns 4 --rate 0.5",)),
    ):
        made = with_parameters(command, *flags(load=load))
        group.command(name, epilog=examples(*lines))(made)
    epilog = examples("baton bench synth trace.jsonl --traffic code --requests 1000")
    group.command("synth", epilog=epilog)(_synth)


def _exit(points: Any, values: dict[str, Any], by_group: str = "") -> None:
    raise typer.Exit(run_points(points, values, by_group))


Isl = Annotated[str, typer.Option(help="Prompt tokens, as 4K.", rich_help_panel=PANEL)]
Osl = Annotated[str, typer.Option(help="Output tokens.", rich_help_panel=PANEL)]
Requests = Annotated[int, typer.Option(help="Requests to send.", rich_help_panel=PANEL)]


def _run(
    isl: Isl = "1K",
    osl: Osl = "128",
    requests: Requests = 100,
    warm: Annotated[
        int, typer.Option(help="Requests before the measurement.", rich_help_panel=PANEL)
    ] = 2,
    **values: Any,
) -> None:
    """Send requests of one shape that share nothing.

    Open loop unless --concurrency is given: requests are sent when they are due, whether or not
    earlier ones are answered. Exits with 3 when objectives are missed, the measurement is invalid
    or, without objectives, a request failed.
    """
    from baton.bench.workload.shapes import Point, fixed

    workload = fixed(tokens("--isl", isl), tokens("--osl", osl), requests, warm)
    _exit([Point("run", workload, section_of(LoadFlags, values).load(RATE))], values)


def _grid(
    isl: Annotated[
        str, typer.Option(help="Prompt lengths, as 1K,4K.", rich_help_panel=PANEL)
    ] = "1K,4K",
    osl: Annotated[
        str, typer.Option(help="Output lengths, as 128,1K.", rich_help_panel=PANEL)
    ] = "128",
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, as 1,4,16.", rich_help_panel=PANEL)
    ] = "1,4,16",
    rounds: Annotated[
        int, typer.Option(help="Requests for each of these.", rich_help_panel=PANEL)
    ] = 4,
    **values: Any,
) -> None:
    """Map prompt length x output length x concurrency: a closed loop for each combination.

    For limits and shapes; what users see under load is what the other commands measure.
    """
    from baton.bench.workload.shapes import grid

    slots = token_list("--concurrency", concurrency)
    lengths = (token_list("--isl", isl), token_list("--osl", osl))
    _exit(grid(*lengths, slots, rounds), values)


def _mixed(
    buckets: Annotated[
        str | None,
        typer.Option(
            help="LENGTH:WEIGHT pairs; 1K:40,4K:25,16K:15,64K:10,128K:6,192K:4 when unset.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    osl: Osl = "1K",
    osl_spread: Annotated[
        float, typer.Option(help="Sigma of log-normal outputs.", rich_help_panel=PANEL)
    ] = 0.5,
    requests: Requests = 200,
    control: Annotated[
        bool,
        typer.Option(help="Also one length with the same total.", rich_help_panel=PANEL),
    ] = True,
    **values: Any,
) -> None:
    """Send prompts of very different lengths in one stream, beside a control of one length.

    The control has as many requests and tokens in all: the difference is what mixing costs.
    """
    from baton.bench.workload.shapes import BUCKETS, Point, mixed
    from baton.bench.workload.shapes import control as same_total

    weights = BUCKETS if buckets is None else length_buckets(buckets)
    load = section_of(LoadFlags, values).load(RATE)
    seed = section_of(ServerFlags, values).seed
    workload = mixed(weights, tokens("--osl", osl), requests, seed, osl_spread)
    points = [Point("mixed", workload, load)]
    if control:
        points.append(Point("control", same_total(workload), load))
    _exit(points, values, by_group="prompt length")


def _prefix(
    lengths: Annotated[
        str, typer.Option(help="Prefix lengths, as 4K,16K.", rich_help_panel=PANEL)
    ] = "4K,16K,64K,128K",
    hits: Annotated[
        str, typer.Option(help="Shares of the prompt that are cached.", rich_help_panel=PANEL)
    ] = "0,0.2,0.5,0.8",
    osl: Osl = "64",
    requests: Annotated[
        int, typer.Option(help="Requests of each group.", rich_help_panel=PANEL)
    ] = 8,
    prefixes: Annotated[
        int, typer.Option(help="Different prefixes of each group.", rich_help_panel=PANEL)
    ] = 2,
    page: Annotated[
        int, typer.Option(help="Tokens in a page of the cache.", rich_help_panel=PANEL)
    ] = 64,
    **values: Any,
) -> None:
    """Measure groups with an exact prefix hit: warm up, reset, prime, measure, verify.

    A group whose measured hit is more than 2 points off makes the run invalid. A closed loop of
    one request at a time unless --rate or --concurrency says otherwise.
    """
    from baton.bench.record import Load
    from baton.bench.workload.prefix import prefix
    from baton.bench.workload.shapes import Point

    try:
        shares = [float(part) for part in hits.split(",")]
    except ValueError:
        raise ConfigError(f"--hits {hits!r}: write shares as 0,0.2,0.5,0.8") from None
    asked = section_of(LoadFlags, values)
    load = asked.load(None)
    if load.kind == "open" and load.rate is None and load.ramp is None:
        load = Load(kind="closed", concurrency=1)
    workload = prefix(
        token_list("--lengths", lengths),
        shares,
        osl=tokens("--osl", osl),
        requests=requests,
        prefixes=prefixes,
        page=page,
        concurrency=load.concurrency or 1,
        seed=section_of(ServerFlags, values).seed,
    )
    _exit([Point("prefix", workload, load)], values, by_group="prefix and hit")


def _replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="Mooncake JSONL, Azure CSV or Baton JSONL; 'synthetic' is a made-up conversation.",
        ),
    ],
    requests: Annotated[
        int | None,
        typer.Option(help="Only the first so many.", rich_help_panel=PANEL),
    ] = None,
    time_scale: Annotated[
        float,
        typer.Option(
            help="Times are multiplied by it: 0.5 is twice as fast.", rich_help_panel=PANEL
        ),
    ] = 1.0,
    length_scale: Annotated[
        str, typer.Option(help="Scale of prompt lengths, as 1/64.", rich_help_panel=PANEL)
    ] = "1",
    output_scale: Annotated[
        str | None,
        typer.Option(help="Scale of outputs; as --length-scale if unset.", rich_help_panel=PANEL),
    ] = None,
    loops: Annotated[
        int,
        typer.Option(help="Times the trace runs, with other prompts.", rich_help_panel=PANEL),
    ] = 1,
    max_len: Annotated[
        str | None,
        typer.Option(
            help="Cut requests to it; the server's limit if unset.", rich_help_panel=PANEL
        ),
    ] = None,
    **values: Any,
) -> None:
    """Replay a trace: its times, its lengths, and exactly the prefix sharing that it tells of.

    --rate stretches the trace's times to that mean rate. Latency counts from when a request was
    due.
    """
    from baton.bench.load.server import ask_server
    from baton.bench.workload.replay import Scales, replay
    from baton.bench.workload.shapes import Point

    server = section_of(ServerFlags, values)
    jobs = _trace(trace, requests, server.seed)
    length = positive_fraction("--length-scale", length_scale)
    scales = Scales(
        time=time_scale,
        length=length,
        output=length
        if output_scale is None
        else positive_fraction("--output-scale", output_scale),
        loops=loops,
        max_tokens=None if max_len is None else tokens("--max-len", max_len),
    )
    load = section_of(LoadFlags, values).load(None)
    if load.kind == "open" and load.rate is None and load.ramp is None and jobs[0].at is None:
        raise ConfigError(f"{trace} tells no times: give --rate, --ramp or --concurrency")
    if max_len is None:
        limit = ask_server(server.target()).get("max_model_len")
        scales = dataclasses.replace(scales, max_tokens=limit)
    _exit([Point("replay", replay(jobs, scales, trace), load)], values)


def _trace(name: str, limit: int | None, seed: int) -> Any:
    from baton.bench.workload.synth import synthesize
    from baton.bench.workload.trace import read_trace

    if limit is not None and limit < 1:
        raise ConfigError(f"--requests must be at least 1, got {limit}")
    if name == SYNTHETIC and not Path(name).exists():
        return synthesize(limit or 100, seed)
    return read_trace(name, limit)


def _session(
    sessions: Annotated[int, typer.Option(help="Conversations.", rich_help_panel=PANEL)] = 16,
    turns: Annotated[int, typer.Option(help="Requests of each.", rich_help_panel=PANEL)] = 5,
    system: Annotated[
        int, typer.Option(help="Tokens that begin every one.", rich_help_panel=PANEL)
    ] = 512,
    first: Annotated[
        int, typer.Option(help="Tokens of the first message.", rich_help_panel=PANEL)
    ] = 1024,
    message: Annotated[
        int, typer.Option(help="Tokens of later messages.", rich_help_panel=PANEL)
    ] = 128,
    osl: Osl = "128",
    think: Annotated[
        float,
        typer.Option(help="Mean seconds from answer to next turn.", rich_help_panel=PANEL),
    ] = 5.0,
    **values: Any,
) -> None:
    """Hold conversations: a growing context, and a pause before each next turn.

    --rate counts requests: conversations begin at that rate over --turns. --concurrency is
    conversations at once.
    """
    from baton.bench.workload.session import Sessions, session
    from baton.bench.workload.shapes import Point

    seed = section_of(ServerFlags, values).seed
    shape = Sessions(sessions, turns, system, first, message, tokens("--osl", osl), think, seed)
    load = section_of(LoadFlags, values).load(RATE)
    _exit([Point("session", session(shape), load)], values, by_group="turn")


def _synth(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the trace goes.")],
    traffic: Annotated[
        str, typer.Option(help="What it looks like: conversation, chat or code.")
    ] = "conversation",
    requests: Annotated[int, typer.Option(help="Requests in it.")] = 1000,
    seed: Annotated[int, typer.Option(help="Another one makes another trace.")] = 0,
) -> None:
    """Make a trace from published statistics, in Mooncake's form."""
    from baton.bench.workload.synth import TRAFFIC, synthesize
    from baton.bench.workload.trace import write_trace

    if traffic not in TRAFFIC:
        raise ConfigError(f"--traffic {traffic!r}: expected one of {', '.join(TRAFFIC)}")
    write_trace(file, synthesize(requests, seed, TRAFFIC[traffic]))
    errors.print(f"{requests} requests written to {file}", style="dim", markup=False)
