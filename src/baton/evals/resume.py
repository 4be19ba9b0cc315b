"""What an evaluation has answered so far, in a file beside its result, so that it can go on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import msgspec

from baton.core.errors import ConfigError
from baton.evals.document import Answer, Digest
from baton.evals.exam import Exam


class Part(msgspec.Struct, kw_only=True):
    """Answers about one context. digest: of its exam, see `Digest`. seconds: that they took.
    computed: tokens, see `Document`."""

    task: str
    length: int
    number: int
    digest: str
    answers: list[Answer]
    seconds: float
    computed: int | None


Key = tuple[str, int, int]


class Parts:
    """Answers by context: a first line that says whose they are, then a line for each context.
    There is no file before the first context has been answered.

    Args:
        path: of the file, gone on from if it is there; None keeps nothing.
        head: subject and suite. Only answers of the same are gone on from.

    Raises:
        ConfigError: it cannot be gone on from.
    """

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path, self._parts = path, dict[Key, Part]()
        self._head = msgspec.json.encode(head)
        if path is not None and path.exists():
            for part in _read(path, msgspec.json.decode(self._head)):
                self._parts[part.task, part.length, part.number] = part

    def find(self, exam: Exam) -> Part | None:
        """What is known about its context.

        Raises:
            ConfigError: other questions were asked about it.
        """
        part = self._parts.get((exam.task, exam.length, exam.number))
        if part is None:
            return None
        if part.digest != Digest.of(exam) or len(part.answers) != len(exam.queries):
            raise ConfigError(
                f"{self._path} has answers to other questions: its {exam.task} at {exam.length} is "
                "of another tokenizer, text or version of Baton; remove it to start anew"
            )
        return part

    def add(self, part: Part) -> None:
        """One more context.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self._path is None:
            return
        line = msgspec.json.encode(part) + b"\n"
        try:
            with self._path.open("ab") as file:
                file.write(line if file.tell() else self._head + b"\n" + line)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error}") from None


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """While this process evaluates for the result `out`, no other one does. The system drops the
    lock of a process that dies.

    The lock's empty file stays, hidden beside the result: were it removed, a process that has it
    open already could lock what no longer has a name, while another one locks a new file.

    Raises:
        ConfigError: another one is doing so now, or the lock cannot be made.
    """
    lock_file = out.with_name(f".{out.name}.lock")
    lock = filelock.FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except (OSError, filelock.Timeout) as error:
        if not isinstance(error, filelock.Timeout) or not lock_file.exists():
            raise ConfigError(f"cannot make {lock_file}, the lock of {out}: {error}") from None
        raise ConfigError(
            f"another evaluation is writing {out}: wait for its end, or give another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()


def part_of(out: Path, resume: bool) -> Path:
    """Where answers are kept until the result `out` is written.

    Args:
        resume: go on from what is there.

    Raises:
        ConfigError: something is there and nobody said to go on from it, or nothing is to go on
            with, for the result is there.
    """
    path = out.with_name(out.name + ".part")
    if path.exists() and not resume:
        raise ConfigError(
            f"{path} is of an evaluation that was stopped: --resume goes on with it; else remove it"
        )
    if resume and out.exists() and not path.exists():
        raise ConfigError(f"{out} is there and whole: nothing to --resume; remove it to start anew")
    return path


def _read(path: Path, head: dict[str, Any]) -> list[Part]:
    """Whole lines of a file that starts with `head`; what was cut short is taken off it."""
    try:
        first, *lines = path.read_bytes().split(b"\n")
        found = msgspec.json.decode(first, type=dict[str, Any])
        parts = [msgspec.json.decode(line, type=Part) for line in lines[:-1]]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} holds no answers of baton eval: {error}; remove it to start anew"
        ) from None
    other = [name for name, value in head.items() if found.get(name) != value]
    if other:
        raise ConfigError(
            f"{path} is of another evaluation: its {' and '.join(other)} is not what was asked for "
            "now; remove it to start anew"
        )
    if lines and lines[-1]:
        os.truncate(path, path.stat().st_size - len(lines[-1]))
    return parts
