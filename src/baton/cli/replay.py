"""`baton replay TRACE`: send a trace to a server, open loop, and print what clients saw."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.show import WIDTH, errors, examples, out, version
from baton.core import env
from baton.core.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.trace import TraceRequest

SYNTHETIC = "synthetic"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "replay",
        epilog=examples(
            "baton replay synthetic --requests 50 --length-scale 1/64",
            "baton replay conversation_trace.jsonl --base-url http://127.0.0.1:8000 "
            "--time-scale 2 --requests 500 --out result.json",
        ),
    )(_replay)


def _replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help=f"Mooncake JSONL file, or '{SYNTHETIC}' for a made-up conversation.",
        ),
    ],
    base_url: Annotated[str, typer.Option(help="Server to send to.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Served model; the first when unset.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key (also BATON_API_KEY).")] = None,
    requests: Annotated[int | None, typer.Option(help="Send only the first so many.")] = None,
    length_scale: Annotated[
        str, typer.Option(help="Scale of prompt lengths, 1/N: blocks stay whole and shared.")
    ] = "1",
    output_scale: Annotated[
        str | None, typer.Option(help="Scale of output lengths; as --length-scale when unset.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Times are multiplied by it: 0.5 sends twice as fast.")
    ] = 1.0,
    max_len: Annotated[
        int | None,
        typer.Option(help="Cut requests to so many tokens; the server's limit if unset."),
    ] = None,
    vocab: Annotated[
        str, typer.Option(help="Token ids are drawn from LOW:HIGH (HIGH excluded).")
    ] = "256:32000",
    seed: Annotated[
        int, typer.Option(help="Other seeds make other tokens and synthetic traces.")
    ] = 0,
    max_concurrency: Annotated[int, typer.Option(help="Most requests in flight.")] = 256,
    timeout: Annotated[float, typer.Option(help="Longest silence of a request in seconds.")] = 600,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Also write everything as JSON.")
    ] = None,
) -> None:
    """Replay a trace against a running server and measure it.

    Prompts are token ids. Each request is sent when it is due, whether or not earlier ones are
    answered, and latency counts from then. Exits with 1 when a request failed.
    """
    from baton.bench.replay import Target, ask_model
    from baton.bench.replay_report import summarize, table, write_json
    from baton.bench.run import run
    from baton.bench.trace import PromptMaker, make_jobs

    if (
        not 0 <= time_scale < math.inf
        or max_concurrency < 1
        or not timeout > 0
        or (max_len or 2) < 2
    ):
        raise ConfigError(
            "--time-scale must be at least 0, --max-concurrency 1, --max-len 2, --timeout above 0"
        )
    rows = _trace(trace, requests, seed)
    maker = PromptMaker(_fraction("--length-scale", length_scale), _range(vocab), seed)
    outputs = None if output_scale is None else _fraction("--output-scale", output_scale)
    target = Target(base_url, api_key or env.API_KEY.get() or None, timeout, max_concurrency)
    served = asyncio.run(ask_model(target))
    limit = max_len or served.max_model_len
    jobs = list(
        make_jobs(rows, maker, time_scale=time_scale, output_scale=outputs, max_tokens=limit)
    )
    results = run(jobs, target, model or served.name, errors)
    summary = summarize(results)
    out.print(table(summary, f"{len(jobs)} requests of {trace} to {served.name}"), width=WIDTH)
    if out_file is not None:
        about = {
            "baton": version(),
            "server": {"url": base_url, **vars(served)},
            "trace": {
                "name": trace,
                "length_scale": str(maker.scale),
                "output_scale": str(maker.scale if outputs is None else outputs),
                "time_scale": time_scale,
                "max_len": limit,
                "seed": seed,
                "max_concurrency": max_concurrency,
            },
        }
        write_json(out_file, summary, results, about)
        errors.print(f"written to {out_file}", style="dim", markup=False)
    raise typer.Exit(1 if summary.failed else 0)


def _trace(name: str, limit: int | None, seed: int) -> list[TraceRequest]:
    from baton.bench.synth import synthesize
    from baton.bench.trace import read_trace

    if limit is not None and limit < 1:
        raise ConfigError(f"--requests must be at least 1, got {limit}")
    if name == SYNTHETIC and not Path(name).exists():
        return synthesize(limit or 100, seed)
    return read_trace(name, limit)


def _fraction(flag: str, text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{flag} {text!r}: write a number or a fraction such as 1/64") from None
    if value <= 0:
        raise ConfigError(f"{flag} must be greater than 0, got {text}")
    return value


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise ConfigError(f"--vocab {text!r}: write LOW:HIGH, for example 256:32000")
    return int(low), int(high)
