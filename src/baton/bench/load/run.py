"""One load run: worker processes send, this process collects, writes and judges."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton import __version__
from baton.bench.about import commit
from baton.bench.load.arrivals import arrival_times
from baton.bench.load.lag import judge, lag_summary
from baton.bench.load.server import ask_server, reset_cache
from baton.bench.load.target import Target
from baton.bench.load.team import Team
from baton.bench.load.worker import Finished, Share, Unit
from baton.bench.metrics import by_group, metrics
from baton.bench.record import Load, Record, Run
from baton.bench.runfile import RunWriter
from baton.bench.workload.job import Job, Phase, Workload
from baton.core.errors import ConfigError

#: points by which a measured prefix hit may differ from the planned one
HIT_TOLERANCE = 0.02
#: streams that one worker keeps up with on a usual core
STREAMS = 1000

OnRecords = Callable[[list[Record]], None]


def run_load(
    workload: Workload,
    load: Load,
    target: Target,
    *,
    name: str = "",
    out: Path | None = None,
    workers: int | None = None,
    seed: int = 0,
    pools: dict[str, int] | None = None,
    on_records: OnRecords = lambda _: None,
    on_in_flight: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Offer `workload` to `target` as `load` says and return what came of it.

    Runs one after another on the same server need a `target.seed` or `salt` each: equal prompts
    would be answered from its prefix cache. Only a server that cannot be reached at the start, or
    options that make no sense, raise; all that goes wrong with requests is in the records, and what
    makes the figures worthless is in `run.invalid`, one sentence each.

    Args:
        name: of the run, for the reader.
        out: JSON lines file, written as requests end.
        workers: processes that send; chosen from the load when None.
        seed: of the arrival times.
        pools: devices that serve, as {"prefill": 4, "decode": 2} or {"all": 8}.
        on_records: called with new records a few times a second, for progress.
        on_in_flight: called as often with the number of requests on the way.
        stop: asked a few times a second; True ends the run early, and what is due by then becomes
            "cancelled".

    Raises:
        ServerError: no server answers, or it serves no model.
        ConfigError: the load does not fit the workload, or a request the server.
    """
    units = plan_units(workload.jobs, load, seed)
    served = ask_server(target) | ({"pools": pools} if pools else {})
    run = Run(
        name=name,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        workload={**workload.about, **target.about(), "arrival_seed": seed},
        load=load,
        server=served,
        client={**_client(), "prompt_salt": target.salt},
    )
    _check_fit(workload, served.get("max_model_len"))
    team = Team(_workers(workers, load, len(units)), on_in_flight)
    run.client["workers"] = team.size
    writer = RunWriter(out, run) if out is not None else None
    collected = _Collector(run, writer, on_records)
    try:
        with team:
            _before(workload, target, run, team, collected, stop)
            done = _phase(team, target, run, units, load, "measure", collected, stop)
        _judge(run, workload, done, team.lost)
        if writer is not None:
            writer.close(run)
    finally:
        if writer is not None:
            writer.__exit__(None, None, None)
    return run


def plan_units(jobs: Sequence[Job], load: Load, seed: int = 0) -> list[Unit]:
    """Jobs as units in order of time: a request each, or the turns of a session together.

    Raises:
        ConfigError: there is nothing to send, or the load lacks a rate or a concurrency.
    """
    if not jobs:
        raise ConfigError("the workload has no requests")
    if load.concurrency is not None and load.concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, got {load.concurrency}")
    groups: dict[Any, list[tuple[int, Job]]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault(("s", job.session) if job.session is not None else index, []).append(
            (index, job)
        )
    turns = [tuple(group) for group in groups.values()]
    if load.kind == "closed":
        if load.concurrency is None:
            raise ConfigError("a closed loop needs a concurrency")
        return [Unit(group) for group in turns]
    return sorted(
        (Unit(group, at) for group, at in zip(turns, _times(turns, load, seed), strict=True)),
        key=lambda unit: unit.at or 0.0,
    )


def _times(turns: Sequence[tuple[tuple[int, Job], ...]], load: Load, seed: int) -> Sequence[float]:
    """When each unit begins. A trace sets its own times, stretched to the load's rate if it has
    one; a rate counts requests, so sessions of n turns begin at a rate of 1/n of it."""
    own = [group[0][1].at for group in turns]
    if all(at is not None for at in own) and load.ramp is None:
        times = [at or 0.0 for at in own]
        first, span = min(times), max(times) - min(times)
        scale = 1.0
        if load.rate is not None:
            if not 0 < load.rate < math.inf:
                raise ConfigError(f"an open loop needs a rate above 0, got {load.rate}")
            scale = (len(times) - 1) / load.rate / span if span else 1.0
        return [(at - first) * scale for at in times]
    each = sum(map(len, turns)) / len(turns)
    if load.ramp is None and load.rate is not None:
        load = Load(kind="open", rate=load.rate / each, burstiness=load.burstiness)
    return arrival_times(load, len(turns), seed)


class _Collector:
    """Records as they come: kept, written, shown."""

    def __init__(self, run: Run, writer: RunWriter | None, on_records: OnRecords) -> None:
        self._run, self._writer, self._on_records = run, writer, on_records

    def __call__(self, lines: bytes, records: list[Record]) -> None:
        if self._writer is not None:
            self._writer.lines(lines)
        self._run.records += records
        self._on_records(records)


def _before(
    workload: Workload,
    target: Target,
    run: Run,
    team: Team,
    collected: _Collector,
    stop: Callable[[], bool],
) -> None:
    """Warm up, empty the cache, prime it. What fails here makes the figures worthless."""
    for number, (phase, jobs) in enumerate(workload.before):
        if (
            workload.reset
            and phase == "prime"
            and "prime" not in [p for p, _ in workload.before[:number]]
        ):
            run.server["cache_reset"] = reset_cache(target)
        load = Load(kind="closed", concurrency=workload.before_concurrency)
        _phase(team, target, run, plan_units(jobs, load), load, phase, collected, stop)
    failed = [r for r in run.records if r.status != "ok"]
    if failed:
        run.invalid.append(
            f"{len(failed)} of {len(run.records)} requests before the measurement failed, the "
            f"first with: {failed[0].error}"
        )


def _phase(
    team: Team,
    target: Target,
    run: Run,
    units: Sequence[Unit],
    load: Load,
    phase: Phase,
    collected: _Collector,
    stop: Callable[[], bool],
) -> list[Finished]:
    model = str(run.server["model"])
    size = team.size
    shares = []
    for k in range(size):
        slots = None
        if load.concurrency is not None:
            slots = load.concurrency // size + (k < load.concurrency % size)
        shares.append(Share(target, model, units[k::size], slots, phase))
    return team.work(shares, collected, stop)


def _check_fit(workload: Workload, limit: int | None) -> None:
    """Say now what the server would say of every such request."""
    longest = max(workload.jobs, key=lambda job: job.length + job.max_tokens)
    if limit is not None and longest.length + longest.max_tokens > limit:
        raise ConfigError(
            f"a request of {longest.length} prompt and {longest.max_tokens} output tokens does not "
            f"fit the server's {limit}: leave out such lengths, or cut a trace with --max-len"
        )


def _workers(wanted: int | None, load: Load, units: int) -> int:
    """Processes that send: as asked for, else one for each `STREAMS` requests that may be on the
    way, and no more than half the cores."""
    if wanted is not None and wanted < 1:
        raise ConfigError(f"workers must be at least 1, got {wanted}")
    most = load.concurrency or units
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        wanted = min(-(-most // STREAMS), max(1, cores // 2))
    return max(1, min(wanted, most))


def _client() -> dict[str, Any]:
    return {
        "baton": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def _judge(run: Run, workload: Workload, done: Sequence[Finished], lost: list[str]) -> None:
    """Fill in what is known only now, and say what makes the figures worthless."""
    run.records.sort(key=lambda r: (r.phase == "measure", r.phase == "prime", r.index))
    found = metrics(run)
    run.seconds = found["seconds"]
    lag = lag_summary(
        (late for worker in done for late in worker.ticks),
        (late for worker in done for late in worker.sends),
    )
    run.client["lag"] = lag
    run.invalid += lost
    if slow := judge(lag, found["latency"]["ttft"]["p50"]):
        run.invalid.append(slow)
    run.invalid += _hits(run, workload, found["hit"])


def _hits(run: Run, workload: Workload, hit: dict[str, float | None]) -> list[str]:
    """What speaks against the prefix hits: a group that missed its plan, or a server that had seen
    these prompts before. A chat's template is shared by all, and none of ours."""
    if not workload.expected_hit:
        seen, ideal = hit["token"] or 0.0, hit["ideal"] or 0.0
        if run.workload["prompts"] == "chat" or seen <= ideal + HIT_TOLERANCE:
            return []
        return [
            f"{seen:.1%} of prompt tokens came from the prefix cache, where the workload shares "
            f"{ideal:.1%}: the server had seen these prompts; another --salt makes new ones"
        ]
    told = []
    groups = by_group(run)
    for group, expected in workload.expected_hit.items():
        share = groups[group]["hit"]["token"] if group in groups else None
        if share is None:
            told.append(
                f"{group}: the server does not report cached tokens, so its prefix hit cannot be "
                "verified"
            )
        elif abs(share - expected) > HIT_TOLERANCE:
            told.append(
                f"{group}: {share:.1%} of prompt tokens came from the prefix cache, expected "
                f"{expected:.1%} within {HIT_TOLERANCE * 100:.0f} points"
            )
    return told
