"""A stopped evaluation goes on where it was, and only as the same evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.evals.document import Answer, Document
from baton.evals.exam import Exam, Suite
from baton.evals.marks import Marks
from baton.evals.resume import Parts, alone, part_of
from baton.evals.run import run
from baton.evals.subject import Progress, answer_to

SUITE = Suite("marks", ("single", "nth"), (128, 256), 2, 4, alphabet=16)
FACTS: tuple[dict[str, Any], dict[str, Any]] = ({"name": "model"}, {})


class Stopping:
    """Knows every second answer, until it is interrupted before context number `stop`."""

    longest: int | None = None

    def __init__(self, stop: int = 1000) -> None:
        self.stop, self.asked = stop, list[tuple[str, int, int]]()

    def take(self, exam: Exam, progress: Progress) -> list[Answer]:
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        self.asked.append((exam.task, exam.length, exam.number))
        return [answer_to(exam, query, i % 2 == 0) for i, query in enumerate(exam.queries)]

    def loss(self, tokens: list[int]) -> float:
        raise AssertionError("no text was given")


def examine(subject: Stopping, path: Path | None, suite: Suite = SUITE, **how: Any) -> Document:
    head = {"subject": FACTS[0], "suite": suite.settings()}
    parts = Parts(path, head | how.get("head", {}))
    form = how.get("form") or Marks(16, 0)
    return run(subject, form, suite, [], FACTS, lambda *_: None, parts)


@pytest.mark.parametrize("torn", [b"", b'{"task":"nth","length":12'])
def test_it_goes_on_where_it_was_stopped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "x.json.part"
    whole = examine(Stopping(), None)
    with pytest.raises(KeyboardInterrupt):
        examine(Stopping(3), path)
    with path.open("ab") as file:
        file.write(torn)  # as a machine that loses power leaves it
    with pytest.raises(KeyboardInterrupt):
        examine(Stopping(2), path)
    rest = Stopping()
    found = examine(rest, path)
    assert len(rest.asked) == 8 - 3 - 2
    assert found.answers == whole.answers
    assert (found.digest, found.prompts) == (whole.digest, whole.prompts)
    nothing = Stopping(0)
    assert examine(nothing, path).answers == whole.answers


def test_only_the_same_evaluation_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.json.part"
    examine(Stopping(), path)
    kept = path.read_bytes()
    with pytest.raises(ConfigError, match="its suite is not what was asked for"):
        examine(Stopping(), path, replace(SUITE, seed=1))
    with pytest.raises(ConfigError, match="its subject is not"):
        examine(Stopping(), path, head={"subject": {"name": "other"}})
    assert path.read_bytes() == kept
    with pytest.raises(ConfigError, match="answers to other questions"):
        examine(Stopping(), path, form=Marks(16, 1))
    assert path.read_bytes() == kept
    first, second, *_ = kept.split(b"\n")
    for wrong in (b"", b"[1]\n", b"{}\n{}\n", b"\xff\n", first + b"\n\n" + second + b"\n"):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match="holds no answers of baton eval"):
            examine(Stopping(), path)
    with pytest.raises(ConfigError, match="holds no answers of baton eval"):
        examine(Stopping(), tmp_path)
    with pytest.raises(ConfigError, match="cannot write"):
        examine(Stopping(), tmp_path / "none" / "x.part")


def test_an_evaluation_that_answered_nothing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.json.part"
    with pytest.raises(ConfigError, match="too short"):
        examine(Stopping(), path, replace(SUITE, lengths=(8,)))
    with pytest.raises(KeyboardInterrupt):
        examine(Stopping(0), path)
    assert not path.exists()


def test_reading_what_is_kept_never_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json.part"
    with pytest.raises(KeyboardInterrupt):
        examine(Stopping(3), path)
    kept = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        self.open("wb").close()
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(KeyboardInterrupt):
        examine(Stopping(0), path)
    assert path.read_bytes() == kept


def test_only_what_is_not_finished_can_be_gone_on_with(tmp_path: Path) -> None:
    out, part = tmp_path / "x.json", tmp_path / "x.json.part"
    assert part_of(out, False) == part_of(out, True) == part
    part.touch()
    assert part_of(out, True) == part
    with pytest.raises(ConfigError, match="--resume goes on with it"):
        part_of(out, False)
    out.touch()
    assert part_of(out, True) == part  # stopped between writing the one and removing the other
    part.unlink()
    assert part_of(out, False) == part
    with pytest.raises(ConfigError, match="is there and whole"):
        part_of(out, True)


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "x.json", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="the lock of"), alone(out):
            pass
