"""The search through the real load generator, against a stub server whose capacity is planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bench.report.document import Document, read_document
from baton.bench.slo.disk import OtherSearch
from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Curve, Profile
from baton.cli.app import main
from baton.core.errors import ConfigError

#: long enough that a busy machine's lag is a small share of it
FIRST = 0.25


def searched(url: str, folder: Path, *flags: str) -> tuple[Document, int]:
    """What the command left, and its exit code."""
    with pytest.raises(SystemExit) as end:
        main(["bench", "slo", "--url", url, "--out", str(folder), *flags])
    made = read_document(folder / "summary.json")
    late = [note for note in made.searches[0].found.notes if "client cannot offer" in note]
    if late:
        pytest.skip(f"this machine is too busy to measure: {late[0]}")
    return made, int(end.value.code or 0)


def test_concurrency_at_which_tokens_get_too_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 ms and 0.5 ms more for each other request: 20 ms at 39 in flight."""
    profile = Profile(ttft=Curve(base=FIRST), itl=Curve(base=0.001, per_request=0.0005))
    flags = (
        *("--vary", "concurrency", "--start", "16", "--isl", "32", "--osl", "12"),
        *("--tpot", "20.2ms", "--requests", "80", "--stretch", "2", "--highest", "64"),
        "--no-table",
    )
    with stub_server(profile) as url:
        made, code = searched(url, tmp_path, *flags, "--require", "30")
        said = capsys.readouterr()
        # again from the files: no load is offered, and another bar is not met
        again, missed = searched(url, tmp_path, *flags, "--resume", "--require", "1000", "--json")
    told = capsys.readouterr()
    assert (code, missed) == (0, 3)
    assert made.searches[0].capacity == pytest.approx(39, rel=0.05)
    assert again.searches[0].capacity == made.searches[0].capacity
    assert json.loads(told.out)["searches"][0]["capacity"] == made.searches[0].capacity
    assert "concurrency-16-1: " not in told.err
    assert "max meeting all" in said.out
    assert "run 1 of at most 60: 16 in flight: 100.0% met all" in said.err
    assert max(len(line) for line in said.out.splitlines()) <= 100
    assert {path.name for path in tmp_path.iterdir()} >= {
        "report.html",
        "summary.json",
        "runs.csv",
        "loads.csv",
        "concurrency-16-1.jsonl",
    }
    # another command would replace the summary of the search
    before = (tmp_path / "summary.json").read_bytes()
    for command in (["run"], ["slo", "--isl", "16", "--tpot", "1s"]):
        with (
            pytest.raises(ConfigError, match=r"other searches \(32/12\)"),
            stub_server(profile) as same,
        ):
            main(["bench", *command, "--url", same, "--out", str(tmp_path), "--resume"])
    assert (tmp_path / "summary.json").read_bytes() == before
    # runs of another server are not taken for this one's
    with pytest.raises(OtherSearch, match="its run has url"), stub_server(profile) as other:
        main(["bench", "slo", "--base-url", other, "--out", str(tmp_path), *flags, "--resume"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_rate_at_which_slots_run_out(tmp_path: Path) -> None:
    """16 slots of 0.25 + 9 x 0.015 s: they are all taken from 41.6 requests a second on, and 95%
    of a Poisson stream's requests wait less than 0.75 s up to 39.6 (by simulating 200,000). On a
    busy machine the stub itself is slower than its profile: what it served at most says by how
    much."""
    profile = Profile(ttft=Curve(base=FIRST), itl=Curve(base=0.015), slots=16)
    flags = (
        *("--isl", "32", "--osl", "10", "--start", "20", "--ttft", "1s", "--tpot", "50ms"),
        *("--requests", "1000", "--stretch", "3", "--no-table"),
    )
    with stub_server(profile) as url:
        made, code = searched(url, tmp_path, *flags)
    assert code == 0
    found = made.searches[0].found
    served = max(t.throughput["requests"] or 0 for level in found.levels for t in level.trials)
    assert found.capacity == pytest.approx(39.6 * served / 41.6, rel=0.05)
    assert served == pytest.approx(41.6, rel=0.15)


def test_objectives_that_nothing_meets(tmp_path: Path) -> None:
    flags = (
        *("--isl", "8", "--osl", "2", "--ttft", "100ms", "--start", "32", "--most-runs", "3"),
        *("--requests", "20", "--no-table"),
    )
    with stub_server(Profile(ttft=Curve(base=FIRST))) as url:
        made, code = searched(url, tmp_path, *flags)
    assert code == 3
    assert made.searches[0].capacity is None
    assert "No load offered" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "no objective: give at least one of --ttft"),
        (("--ttft", "soon"), "--ttft: cannot read 'soon' as a time"),
        (("--ttft", "1s", "--attainment", "95"), "--attainment"),
        (("--ttft", "1s", "--requests", "0"), "--requests must be at least 1"),
        (("--ttft", "1s", "--tolerance", "-1"), "--tolerance"),
        (("--ttft", "1s", "--stretch", "0"), "--stretch must be at least 1"),
        (("--ttft", "1s", "--burstiness", "inf"), "--burstiness"),
        (("--ttft", "1s", "--require", "nan"), "--require must be a load above 0, got nan"),
        (("--ttft", "1s", "--start", "0"), "first load must lie above 0"),
        (("--ttft", "1s", "--buckets", "1K:x"), "--buckets"),
    ],
)
def test_bad_flags_are_named(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main(["bench", "slo", *flags])
