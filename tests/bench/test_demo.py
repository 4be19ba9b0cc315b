"""The demo, with a stub in the server's place: it starts, talks, loads, prints and cleans up."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from baton.bench import demo
from baton.bench.demo import Speed, plan
from baton.bench.sse import ServerError

FAKE = """
import os, sys
if sys.argv[1] == "models":
    sys.exit({pull})
print("a line of the log", flush=True)
if {fail}:
    sys.exit(3)
open({pid!r}, "w").write(str(os.getpid()))
from baton.bench.stub.__main__ import main
main(["--port", sys.argv[-1], "--profile", '{{"block": 16}}'])
"""


def fake(folder: Path, *, pull: int = 0, fail: bool = False) -> list[str]:
    """A command line that stands for `baton`."""
    script = folder / "fake.py"
    script.write_text(FAKE.format(pull=pull, fail=fail, pid=str(folder / "pid")))
    return [sys.executable, str(script)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    console = Console(width=100, highlight=False)
    with demo.serving(fake(tmp_path), "m", console) as url:
        demo.chat(url, "m", console)
        run = demo.load(url, "m", 1.0, console)
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
    assert not alive(pid)
    assert time.monotonic() - begin < 30
    assert all(record.status == "ok" for record in run.records)
    text = capsys.readouterr().out
    for word in (demo.QUESTIONS[0], " t t", "TTFT", "TPOT", "Prefix hit", "an endless cache"):
        assert word in text
    numbers = text.partition("== Replay")[2]
    assert max(len(line) for line in numbers.splitlines()) <= 100


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)ended with 3.*a line of the log"),
        demo.serving(fake(tmp_path, fail=True), "m", Console(quiet=True)),
    ):
        pass


def test_a_model_that_cannot_be_fetched(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="could not be fetched"),
        demo.serving(fake(tmp_path, pull=1), "m", Console(quiet=True)),
    ):
        pass


def test_a_failure_in_the_middle_stops_the_server(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        demo.serving(fake(tmp_path), "m", Console(quiet=True)),
    ):
        raise ZeroDivisionError
    assert not alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("speed", [Speed(50, 0.3), Speed(500, 0.05), Speed(1e5, 0.001)])
def test_the_load_fits_the_machine_and_shares_prefixes(speed: Speed) -> None:
    jobs = plan(speed, 30.0).jobs
    assert 12 <= len(jobs) <= 300
    assert jobs[0].at == 0.0
    assert jobs[-1].at == pytest.approx(30.0)
    assert all(job.length + job.max_tokens <= 2048 for job in jobs)
    assert sum(job.shared for job in jobs) / sum(job.length for job in jobs) > 0.2
