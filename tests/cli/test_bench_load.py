"""`baton bench run|grid|mixed|prefix|replay|session|synth` as users run them, on the stub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench.runfile import read_run
from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Curve, Profile
from baton.cli.app import main

SMALL = ("--osl", "4", "--prompts", "ids")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_DEBUG", raising=False)


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    # a first token late enough for a busy machine's lag to stay below 5% of it
    with stub_server(Profile(ttft=Curve(base=0.8), itl=Curve(base=0.005), block=16)) as url:
        yield url


def run(
    capsys: pytest.CaptureFixture[str], url: str, command: str, *arguments: str
) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as end:
        main(["bench", command, *arguments, "--url", url])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if "--json" not in arguments:
        assert all(len(line) <= 100 for line in said.out.splitlines())
    return int(end.value.code or 0), said.out, said.err


def test_run_prints_and_writes(
    capsys: pytest.CaptureFixture[str], stub: str, tmp_path: Path
) -> None:
    flags = ("--isl", "64", "--requests", "8", "--rate", "20", "--pools", "prefill=2,decode=1")
    flags += ("--ttft", "5s", "--tpot", "1s", "--out", str(tmp_path / "o"))
    code, out, err = run(capsys, stub, "run", *SMALL, *flags)
    assert code == 0, out + err
    for words in (
        "TTFT",
        "8 answered, 0 failed",
        "Attainment",
        "100.0%",
        "Goodput",
        "Per prefill device",
        "Client lag",
        "from the scheduled send to the first stream event",  # a definition
    ):
        assert words in out
    assert "written to" in err
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    entry = summary["runs"][0]
    kept = read_run(tmp_path / "o" / "run.jsonl")
    assert entry["metrics"]["requests"] == {
        "sent": 8,
        "ok": 8,
        "errors": 0,
        "timeouts": 0,
        "cancelled": 0,
        "failures": {},
    }
    assert summary["goal"]["slo"] == {"ttft": 5.0, "tpot": 1.0, "e2e": None}
    assert "<!doctype html>" in (tmp_path / "o" / "report.html").read_text()
    assert entry["metrics"]["attainment"]["all"] == 1.0
    assert kept.workload["isl"] == 64
    assert sum(r.phase == "measure" for r in kept.records) == 8
    assert {"ttft", "percentile"} <= summary["definitions"].keys()


def test_missed_objectives_exit_3_and_json_is_all_of_stdout(
    capsys: pytest.CaptureFixture[str], stub: str
) -> None:
    flags = ("--requests", "4", "--concurrency", "4", "--isl", "32", "--ttft", "10ms")
    code, out, _ = run(capsys, stub, "run", *SMALL, *flags, "--json", "--seed", "7")
    assert code == 3
    assert json.loads(out)["runs"][0]["metrics"]["attainment"]["ttft"] == 0.0


def test_failed_requests_exit_3_without_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(Profile(ttft=Curve(base=0.5), faults={"status": 2})) as url:
        flags = ("--requests", "4", "--concurrency", "4", "--isl", "32", "--warm", "0")
        code, out, _ = run(capsys, url, "run", *SMALL, *flags, "--no-definitions")
        assert code == 3
        assert "2 x HTTP 500: a planted failure" in out
        code, out, _ = run(capsys, url, "run", *SMALL, *flags, "--attainment", "0.5", "--e2e", "9s")
        assert code == 0, out  # half of what was sent is what was asked


def test_grid_resumes(capsys: pytest.CaptureFixture[str], stub: str, tmp_path: Path) -> None:
    flags = ("--isl", "32,64", "--osl", "2", "--concurrency", "1,2", "--rounds", "1")
    flags += ("--out", str(tmp_path), "--no-definitions")
    code, out, _ = run(capsys, stub, "grid", *flags)
    assert code == 0, out
    assert "4 runs on stub" in out
    names = ["32-2-c1", "32-2-c2", "64-2-c1", "64-2-c2"]
    assert all(name in out for name in names)
    seeds = {read_run(tmp_path / f"{name}.jsonl").workload["prompt_seed"] for name in names}
    assert len(seeds) == 4  # no prompt of one point may be in the cache from another
    code, _, err = run(capsys, stub, "grid", *flags)
    assert (code, "is there already: give --resume" in err) == (2, True)
    # one is incomplete: it alone runs again
    cut = tmp_path / "64-2-c1.jsonl"
    cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:-1]))
    code, out, err = run(capsys, stub, "grid", *flags, "--resume")
    assert code == 0
    assert err.count("taken from") == 3
    assert "64-2-c1: taken" not in err
    code, _, err = run(capsys, stub, "grid", *flags, "--resume", "--seed", "9")
    assert (code, "is of another run" in err) == (2, True)


def test_mixed_has_a_control(capsys: pytest.CaptureFixture[str], stub: str) -> None:
    flags = ("--buckets", "64:2,256:1", "--requests", "9", "--rate", "30", "--no-definitions")
    code, out, _ = run(capsys, stub, "mixed", *SMALL, *flags)
    assert code == 0, out
    assert "mixed: 9 requests" in out
    assert "control: 9 requests" in out
    assert out.count("Input       1,152 tokens") == 2
    assert "6/6" in out
    assert "3/3" in out


def test_prefix_hits_are_verified(capsys: pytest.CaptureFixture[str], stub: str) -> None:
    flags = ("--lengths", "64", "--page", "16", "--requests", "4", "--concurrency", "4")
    code, out, _ = run(capsys, stub, "prefix", *SMALL, *flags, "--seed", "3")
    assert code == 0, out
    for hit in ("0.0%", "20.0%", "50.0%", "80.0%"):
        assert hit in out


def test_replay_of_a_file_and_of_the_synthetic_trace(
    capsys: pytest.CaptureFixture[str], stub: str, tmp_path: Path
) -> None:
    code, _, err = run(capsys, stub, "replay", "/nowhere")
    assert (code, "/nowhere: cannot be read" in err) == (2, True)
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"input": 5, "output": 2}\n' * 3)
    code, _, err = run(capsys, stub, "replay", str(trace))
    assert (code, "tells no times" in err) == (2, True)
    code, out, _ = run(capsys, stub, "replay", str(trace), "--rate", "50", "--no-definitions")
    assert code == 0, out
    assert "replay: 3 requests" in out
    flags = ("--requests", "5", "--length-scale", "1/64", "--time-scale", "0", "--max-len", "64")
    out_flags = ("--out", str(tmp_path / "o"), "--seed", "5")
    code, out, _ = run(capsys, stub, "replay", "synthetic", *flags, *out_flags)
    assert code == 0, out
    kept = read_run(tmp_path / "o" / "replay.jsonl")
    assert (kept.workload["length_scale"], kept.workload["max_tokens"]) == ("1/64", 64)
    assert all(r.input_tokens + r.asked_output <= 64 for r in kept.records)


def test_sessions(capsys: pytest.CaptureFixture[str], stub: str) -> None:
    flags = ("--sessions", "3", "--turns", "2", "--first", "32", "--think", "0.1", "--system", "16")
    code, out, _ = run(capsys, stub, "session", *SMALL, *flags, "--concurrency", "3", "--seed", "4")
    assert code == 0, out
    assert "session by turn" in out
    assert "turn 2" in out


def test_synth_writes_what_replay_reads(
    capsys: pytest.CaptureFixture[str], stub: str, tmp_path: Path
) -> None:
    file = tmp_path / "t.jsonl"
    with pytest.raises(SystemExit) as end:
        main(["bench", "synth", str(file), "--traffic", "code", "--requests", "4"])
    assert not end.value.code
    assert len(file.read_text().splitlines()) == 4
    flags = ("--time-scale", "0", "--length-scale", "1/64", "--seed", "6")
    assert run(capsys, stub, "replay", str(file), *flags)[0] == 0


def test_load_commands_need_none_of_the_engines_packages(stub: str) -> None:
    """What the extra "engine" installs is hidden; a run must not miss it, nor its workers."""
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"torch", "transformers", "tokenizers", "jinja2", "safetensors", "gguf", "zmq",
                   "sentencepiece", "huggingface_hub", "filelock", "fastapi", "uvicorn",
                   "prometheus_client", "triton"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from baton.cli.app import main
main(sys.argv[1:])
"""
    flags = ["--isl", "16", "--osl", "2", "--requests", "2", "--rate", "9", "--seed", "11"]
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "run", "--base-url", stub, *flags],
        capture_output=True,
        text=True,
    )
    assert "2 answered, 0 failed" in done.stdout, done.stderr
    engine = subprocess.run(
        [sys.executable, "-c", code, "serve", "smollm2-135m"], capture_output=True, text=True
    )
    assert engine.returncode == 1
    assert "pip install 'baton-llm[engine]'" in engine.stderr
