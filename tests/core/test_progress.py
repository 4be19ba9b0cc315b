"""Progress: a bar on a terminal, two lines elsewhere."""

from __future__ import annotations

import io

import pytest

from baton.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_two_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(stream=out) as progress:
        for done in (0, 512, 1024, 1024):
            progress(done, 1024, "loading")
    first, last = out.getvalue().splitlines()
    assert first == "loading: 1.00 KiB"
    assert last.startswith("loading: done in ")


def test_no_end_line_when_interrupted() -> None:
    out = io.StringIO()
    with Progress("items", stream=out) as progress:
        progress(1, 3, "layers")
    assert out.getvalue() == "layers: 3\n"


@pytest.mark.parametrize("unit", ["bytes", "items"])
def test_a_bar_on_a_terminal(unit: str) -> None:
    out = Terminal()
    with Progress(unit, stream=out) as progress:  # type: ignore[arg-type]
        progress(1, 2, "loading")
        progress(2, 2, "loading")
        progress(5, 0, "of unknown size")
    assert "loading" in out.getvalue()
