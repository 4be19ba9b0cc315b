"""Runs of a search kept in a folder, so that an interrupted search goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.bench.record import Load, Run
from baton.bench.runfile import CUT_SHORT, RunFileError, read_run
from baton.bench.slo.search import Measure
from baton.core.errors import ConfigError

#: `offer(load, stretch, file)` runs a load and writes the file
Offer = Callable[[Load, int, Path], Run]


class OtherSearch(ConfigError):
    """The folder holds runs of something else."""


def kept(folder: Path, about: dict[str, Any], offer: Offer, resume: bool) -> Measure:
    """A `measure` that answers from the folder where it can and writes there what it runs.

    Args:
        about: what must be equal for runs to belong to one search: parameters of the workload, and
            the server's "url".
        resume: whether stored runs are used. Without it a folder that has some is refused.

    Raises:
        OtherSearch: the folder has runs and `resume` is not set, or they are of another workload.
    """
    stored = sorted(folder.glob("*.jsonl"))
    if stored and not resume:
        raise OtherSearch(
            f"{folder} already holds {len(stored)} runs: give --resume to go on with them, or "
            "another folder"
        )

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        file = folder / f"{stem(load)}-{replicate + 1}.jsonl"
        if not (resume and file.exists()):
            return offer(load, stretch, file)
        known = _stored(file)
        told = {**known.workload, "url": known.server.get("url")}
        for name, wanted in about.items():
            if told.get(name) != wanted:
                raise OtherSearch(
                    f"{file}: its run has {name} {told.get(name)!r}, this search "
                    f"{wanted!r}: give it a folder of its own"
                )
        if CUT_SHORT in known.invalid:
            return offer(load, stretch, file)
        known.name = known.name or file.stem
        return known

    return measure


def stem(load: Load) -> str:
    """Name of a load's files: `rate-2.5` or `concurrency-16`."""
    return f"rate-{load.rate:g}" if load.kind == "open" else f"concurrency-{load.concurrency}"


def _stored(file: Path) -> Run:
    try:
        return read_run(file)
    except RunFileError as error:
        raise OtherSearch(f"{error}; remove the file to measure it again") from None
