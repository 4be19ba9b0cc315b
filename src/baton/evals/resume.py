"""What an evaluation has answered so far, in a file beside its result, so that it can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.core.errors import ConfigError
from baton.evals.document import Answer
from baton.evals.exam import Exam


class Part(msgspec.Struct, kw_only=True):
    """Answers about one context. seconds: that they took. computed: tokens, see `Document`."""

    task: str
    length: int
    number: int
    answers: list[Answer]
    seconds: float
    computed: int | None


Key = tuple[str, int, int]


class Parts:
    """Answers by context: a first line that says whose they are, then a line for each context.

    Args:
        path: of the file; None: there is none, nothing is known and nothing is kept.
        head: subject and suite. Only answers of the same are gone on from.
        resume: go on from a file that is there.

    Raises:
        ConfigError: there is a file and nobody said to go on from it, or it cannot be gone on from.
    """

    def __init__(self, path: Path | None, head: dict[str, Any], resume: bool) -> None:
        self._path, self._parts = path, dict[Key, Part]()
        head = msgspec.json.decode(msgspec.json.encode(head))
        if path is None:
            return
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"{path} is of an evaluation that was stopped: --resume goes on with it; else "
                    "remove it"
                )
            for part in _read(path, head):
                self._parts[part.task, part.length, part.number] = part
        lines = [msgspec.json.encode(one) for one in (head, *self._parts.values())]
        try:
            path.write_bytes(b"\n".join(lines) + b"\n")  # anew: a line may have been cut short
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from None

    def find(self, exam: Exam) -> Part | None:
        """What is known about its context."""
        return self._parts.get((exam.task, exam.length, exam.number))

    def add(self, part: Part) -> None:
        """One more context."""
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(part) + b"\n")


def _read(path: Path, head: dict[str, Any]) -> list[Part]:
    """Whole lines of a file that starts with `head`."""
    first, *lines = path.read_bytes().split(b"\n")
    try:
        found = msgspec.json.decode(first, type=dict[str, Any])
        parts = [msgspec.json.decode(line, type=Part) for line in lines[:-1]]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no answers of baton eval: {error}") from None
    other = [name for name, value in head.items() if found.get(name) != value]
    if other:
        raise ConfigError(
            f"{path} is of another evaluation: its {' and '.join(other)} is not what was asked for "
            "now; remove it to start anew"
        )
    return parts
