"""Runs as JSON lines: what was asked first, then a record as each request ends, and last the run
again with what is known only then. Without that last line the run was cut short; its records stay
readable."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

import msgspec

from baton.bench.record import SCHEMA, Record, Run
from baton.core.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has none; two runs in one folder go unnoticed there
    fcntl = None  # type: ignore[assignment]

CUT_SHORT = "the run was cut short: its file has no closing line"
_record = msgspec.json.Decoder(Record)
_run = msgspec.json.Decoder(Run)


class RunFileError(ConfigError):
    """A file of a run is not what it should be; names the file and the line."""


class RunWriter:
    """Writes a run while it is made; each batch of records is handed to the system at once, so
    that a crash of this process loses none. Use it as a context manager and call `close` with the
    finished run; leaving without it leaves a run that was cut short.

    Raises:
        RunFileError: the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: Path, run: Run) -> None:
        make_folder(path.parent)
        try:
            # not "wb": what another process writes there must outlive this attempt
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise RunFileError(f"{path}: cannot be written: {error.strerror}") from None
        if not _lock(self._file):
            self._file.close()
            raise RunFileError(f"{path}: another process is writing it: give another folder")
        self._file.truncate(0)
        self._head(run)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lines(self, lines: bytes) -> None:
        """Append records that are JSON lines already."""
        self._file.write(lines)
        self._file.flush()

    def close(self, run: Run) -> None:
        """Append the finished run without its records, and close the file."""
        self._head(run)
        self._file.close()

    def _head(self, run: Run) -> None:
        fields = msgspec.to_builtins(run)
        fields.pop("records", None)
        # the version is always written, and first: it tells this line from a record's
        self.lines(msgspec.json.encode({"schema": run.schema, **fields}) + b"\n")


def read_run(path: str | Path) -> Run:
    """A run with its records. One that was cut short says so in `invalid`.

    Raises:
        RunFileError: naming the line, for anything that is not a run of this or an older schema.
    """
    run: Run | None = None
    heads, records = 0, []
    for number, line in _lines(Path(path)):
        try:
            if not line.startswith(b'{"schema"'):
                records.append(_record.decode(line))
                continue
            run, heads = _run.decode(line), heads + 1
        except msgspec.MsgspecError as error:
            if not line.endswith(b"\n"):
                break  # the process died while it wrote this one
            raise RunFileError(
                f"{path}:{number}: expected a run or a request of it, as `baton bench` writes "
                f"them: {error}"
            ) from None
        if run.schema > SCHEMA:
            raise RunFileError(
                f"{path}:{number}: schema {run.schema} is of a newer version; this one reads up "
                f"to {SCHEMA}"
            )
    if run is None:
        raise RunFileError(f"{path}: no run in it: the first line must be one")
    run.records = records
    if heads < 2:
        run.invalid = [*run.invalid, CUT_SHORT]
    return run


def make_folder(folder: Path) -> None:
    """Make a folder for results, and see that files can be written there: better now than after an
    hour of runs.

    Raises:
        RunFileError: it is no folder, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFileError(
            f"{folder}: expected a folder that can be written to: {error.strerror}"
        ) from None


def _lock(file: IO[bytes]) -> bool:
    """Whether the file is this process's alone from now until it is closed."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
    return True


def _lines(path: Path) -> list[tuple[int, bytes]]:
    try:
        return list(enumerate(path.read_bytes().splitlines(keepends=True), start=1))
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from None
