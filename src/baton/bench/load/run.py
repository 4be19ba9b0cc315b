"""One load run: worker processes send, this process collects, writes and judges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.bench.load.target import Target
from baton.bench.record import Load, Record, Run
from baton.bench.workload.job import Workload


def run_load(
    workload: Workload,
    load: Load,
    target: Target,
    *,
    name: str = "",
    out: Path | None = None,
    workers: int | None = None,
    on_records: Callable[[list[Record]], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Offer `workload` to `target` as `load` says and return what came of it.

    Only a server that cannot be reached at the start, or options that make no sense, raise; all
    that goes wrong with requests is in the records, and what makes the figures worthless is in
    `run.invalid` (one sentence each).

    Args:
        out: JSON lines file, written as requests end.
        workers: processes that send; chosen from the load when None.
        on_records: called with new records a few times a second, for progress.
        stop: asked a few times a second; True ends the run early, what is in flight becomes
            "cancelled".

    Raises:
        ServerError: no server answers, or it serves no model.
        ConfigError: the load does not fit the workload.
    """
    raise NotImplementedError
