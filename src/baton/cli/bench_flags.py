"""Flags that the load commands of `baton bench` share, and what they mean."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from baton.cli.show import WIDTH, errors, out
from baton.config.cli import parameters, section_of
from baton.core import env
from baton.core.errors import ConfigError
from baton.core.units import parse_seconds

if TYPE_CHECKING:
    import inspect

    from baton.bench.load.target import Target
    from baton.bench.record import Load, Run
    from baton.bench.report.document import Document, RunSummary
    from baton.bench.slo.level import Goal
    from baton.bench.workload.shapes import Point

#: exit code of a run that missed its objectives, failed requests, or is invalid
NOT_MET = 3


@dataclass(frozen=True)
class ServerFlags:
    """Whom to ask, and in which form."""

    url: Annotated[str, "server to send to"] = "http://127.0.0.1:8000"
    model: Annotated[str | None, "served model; the first one when unset"] = None
    api_key: Annotated[str | None, "key (also BATON_API_KEY)"] = None
    prompts: Annotated[Literal["ids", "text", "chat"], "form of the prompts"] = "ids"
    vocab: Annotated[str, "token ids are drawn from LOW:HIGH (HIGH excluded)"] = "256:32000"
    corpus: Annotated[Path | None, "text that text and chat prompts are made from"] = None
    seed: Annotated[int, "another one makes other arrivals, lengths and traces"] = 0
    salt: Annotated[int | None, "makes the same prompts again; new ones when unset"] = None
    timeout: Annotated[str, "longest silence of a request, as 30s"] = "600s"
    limit: Annotated[str, "most time that a request may take"] = "3600s"
    body: Annotated[str, "JSON fields added to every request; null leaves one out"] = "{}"

    def target(self) -> Target:
        """Where to send; ConfigError names a flag that makes no sense."""
        from baton.bench.load.target import Target

        low, _, high = self.vocab.partition(":")
        if not (low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"--vocab {self.vocab!r}: write LOW:HIGH, for example 256:32000")
        try:
            body = json.loads(self.body)
        except ValueError as error:
            raise ConfigError(f"--body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ConfigError('--body must be a JSON object, as {"ignore_eos": null}')
        return Target(
            self.url,
            self.model,
            self.api_key or env.API_KEY.get() or None,
            prompts=self.prompts,
            vocab=(int(low), int(high)),
            corpus=self.corpus,
            seed=self.seed,
            # prompts that the server has seen would be answered from its cache
            salt=secrets.randbelow(2**31) if self.salt is None else self.salt,
            timeout=seconds("--timeout", self.timeout),
            limit=seconds("--limit", self.limit),
            body=body,
        )


@dataclass(frozen=True)
class LoadFlags:
    """How requests are offered."""

    rate: Annotated[float | None, "requests per second of an open loop"] = None
    concurrency: Annotated[
        int | None, "requests in flight: a closed loop, or with --rate its cap"
    ] = None
    burstiness: Annotated[float, "gamma shape of the gaps: 1 is Poisson, below is burstier"] = 1.0
    ramp: Annotated[str | None, "rate that changes: linear:FROM:TO, exp:FROM:TO or steps:A,B,C"] = (
        None
    )

    def load(self, rate: float | None) -> Load:
        """The load; open at `rate` where no flag says otherwise."""
        from baton.bench.record import Load

        if self.concurrency is not None and self.rate is None and self.ramp is None:
            return Load(kind="closed", concurrency=self.concurrency)
        if self.rate is not None and self.ramp is not None:
            raise ConfigError("give either --rate or --ramp")
        return Load(
            rate=self.rate if self.rate is not None or self.ramp is not None else rate,
            concurrency=self.concurrency,
            burstiness=self.burstiness,
            ramp=self.ramp,
        )


@dataclass(frozen=True)
class ResultFlags:
    """What is asked of the results, and where they go."""

    ttft: Annotated[str | None, "objective for the time to first token, as 4s"] = None
    tpot: Annotated[str | None, "objective for the time per output token, as 50ms"] = None
    e2e: Annotated[str | None, "objective for the whole request"] = None
    attainment: Annotated[float, "share of requests that must meet the objectives"] = 0.95
    out: Annotated[
        Path | None, "folder for each run's JSON lines, summary.json, CSV and report.html"
    ] = None
    resume: Annotated[bool, "take complete runs that are in the folder"] = False
    workers: Annotated[int | None, "processes that send"] = None
    pools: Annotated[str | None, "devices that serve: all=8, or prefill=4,decode=2"] = None
    json: Annotated[bool, "print JSON instead of tables"] = False
    steady: Annotated[bool, "count only requests due at 90% of the most in flight or more"] = False
    definitions: Annotated[bool, "say below the tables what the numbers mean"] = True

    def goal(self) -> Goal | None:
        """The objectives and the share that must meet them; None without objectives."""
        from baton.bench.metrics import Slo
        from baton.bench.slo.level import Goal

        if not 0 < self.attainment <= 1:
            raise ConfigError(f"--attainment must be above 0 and at most 1, got {self.attainment}")
        given = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        slo = Slo(
            **{name: seconds(f"--{name}", text) for name, text in given.items() if text is not None}
        )
        return Goal(slo=slo, attainment=self.attainment) if slo else None

    def devices(self) -> dict[str, int] | None:
        """Devices of each pool."""
        if self.pools is None:
            return None
        found: dict[str, int] = {}
        for part in self.pools.split(","):
            name, _, count = part.partition("=")
            if name not in ("all", "prefill", "decode") or not count.isdecimal() or count == "0":
                raise ConfigError(f"--pools {self.pools!r}: write all=8, or prefill=4,decode=2")
            found[name] = int(count)
        return found


def seconds(flag: str, text: str) -> float:
    """A time above 0 from a flag's text."""
    try:
        value = parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if not value > 0:
        raise ConfigError(f"{flag} must be above 0, got {text}")
    return value


def tokens(flag: str, text: str) -> int:
    """Tokens from `4096` or `4K` (1K is 1024)."""
    number, times = (text[:-1], 1024) if text[-1:] in ("K", "k") else (text, 1)
    if not number.isdecimal() or number == "0":
        raise ConfigError(f"{flag} {text!r}: write tokens as 4096 or 4K")
    return int(number) * times


def token_list(flag: str, text: str) -> list[int]:
    """Token counts separated by commas."""
    return [tokens(flag, part.strip()) for part in text.split(",")]


def positive_fraction(flag: str, text: str) -> Fraction:
    """A number above 0 from `0.5` or `1/64`."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{flag} {text!r}: write a number or a fraction such as 1/64") from None
    if value <= 0:
        raise ConfigError(f"{flag} must be greater than 0, got {text}")
    return value


def length_buckets(text: str) -> dict[int, float]:
    """Weights by prompt length from `1K:4,4K:2`."""
    found: dict[int, float] = {}
    for part in text.split(","):
        length, _, weight = part.partition(":")
        try:
            found[tokens("--buckets", length)] = float(weight or 1)
        except ValueError:
            raise ConfigError(f"--buckets {part!r}: write LENGTH:WEIGHT, as 4K:25") from None
    return found


def flags(*, load: bool = True) -> list[list[inspect.Parameter]]:
    """The shared flags as typer sees them."""
    found = [parameters(ServerFlags, "Server")]
    if load:
        found.append(parameters(LoadFlags, "Load"))
    return [*found, parameters(ResultFlags, "Results")]


def run_points(points: Sequence[Point], values: Mapping[str, Any], by_group: str = "") -> int:
    """Run, print, and say with which code to exit.

    Args:
        by_group: heading of a table with a line for each group, "" for none.
    """
    from baton.bench.sweep import Keep, summary, sweep

    result = section_of(ResultFlags, values)
    goal, pools = result.goal(), result.devices()
    target = section_of(ServerFlags, values).target()
    keep = Keep(result.out, result.resume)
    try:
        runs = sweep(
            points,
            target,
            errors,
            keep=keep,
            workers=result.workers,
            goal=goal,
            steady=result.steady,
            pools=pools,
        )
    except KeyboardInterrupt:
        where = f"; what came is in {result.out}" if result.out else ""
        errors.print(f"stopped{where}", style="yellow", markup=False)
        return 130
    made = summary(runs, goal, result.steady)
    if result.json:
        from baton.bench.report.document import to_json

        print(to_json(made).decode(), end="")
    else:
        _print(runs, made, by_group)
        if result.definitions:
            from baton.bench.table import definitions

            out.print(definitions(), width=min(WIDTH, out.width))
    if result.out is not None:
        errors.print(f"written to {result.out}", style="dim", markup=False)
    return 0 if all(_met(run, result.attainment) for run in made.runs) else NOT_MET


def _print(runs: Sequence[Run], made: Document, by_group: str) -> None:
    from baton.bench.table import failures, problems, rows_table, run_table

    width = min(WIDTH, out.width)
    found = [told.metrics for told in made.runs]
    if len(runs) <= 2:
        for run, numbers in zip(runs, found, strict=True):
            title = f"{run.name}: {numbers['requests']['sent']} requests to {run.server['model']}"
            out.print(run_table(run, numbers, title), width=width)
    else:
        rows = {run.name: numbers for run, numbers in zip(runs, found, strict=True)}
        title = f"{len(runs)} runs on {runs[0].server['model']} (latencies in ms)"
        out.print(rows_table(rows, title, "run"), width=width)
        for run, numbers in zip(runs, found, strict=True):
            for line in (*failures(numbers), *problems(run)):
                out.print(f"{run.name}:", line, width=width)
    if by_group:
        for told in made.runs:
            if told.groups:
                title = f"{told.name} by {by_group} (latencies in ms)"
                out.print(rows_table(told.groups, title, by_group), width=width)


def _met(told: RunSummary, attainment: float) -> bool:
    """Whether a run is valid and met its objectives; without any, whether every request was
    answered."""
    numbers = told.metrics
    share = numbers["attainment"]["all"]
    if share is None:
        met = numbers["requests"]["ok"] == numbers["requests"]["sent"]
    else:
        met = share >= attainment
    return bool(met and not told.invalid)
