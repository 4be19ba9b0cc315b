"""Runs that nobody sent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.bench.record import Run
from baton.bench.runfile import RunWriter


def write_run(path: Path, run: Run) -> None:
    """Write a finished run whole."""
    with RunWriter(path, run) as out:
        encode = msgspec.json.encode
        out.lines(b"".join(encode(record) + b"\n" for record in run.records))
        out.close(run)
