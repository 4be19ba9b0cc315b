"""Load runs against the stub: what is measured is what the stub did, and faults are counted."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.bench.load.lag import judge, lag_summary
from baton.bench.load.run import run_load
from baton.bench.load.server import ask_server
from baton.bench.load.target import Target
from baton.bench.metrics import metrics, tpot, ttft
from baton.bench.record import Load, Run
from baton.bench.runfile import read_run
from baton.bench.sse import ServerError, api_base
from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Curve, Profile
from baton.bench.workload.job import Job, Workload
from baton.bench.workload.prefix import prefix
from baton.bench.workload.session import Sessions, session
from baton.core.errors import ConfigError

ALONE = Load(kind="closed", concurrency=1)


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    with stub_server(Profile(ttft=Curve(base=0.02), itl=Curve(base=0.005), block=16)) as url:
        yield url


def shapes(count: int, isl: int = 40, osl: int = 4, base: int = 0) -> Workload:
    return Workload([Job(((base + i, isl),), osl) for i in range(count)], {"name": "test"})


def go(profile: Profile, workload: Workload, load: Load = ALONE, **options: Any) -> Run:
    with stub_server(profile) as url:
        return run_load(workload, load, Target(url, timeout=options.pop("timeout", 60)), **options)


def test_every_latency_is_what_the_stub_did() -> None:
    """The stub notes when it wrote; both read the machine's one monotonic clock."""
    profile = Profile(ttft=Curve(base=0.2, per_token=1e-4), itl=Curve(base=0.03))
    with stub_server(profile) as url:
        run = run_load(shapes(30, isl=1000, osl=12), Load(rate=30), Target(url))
        answers = httpx.get(f"{url}/stats").json()["answers"]
    found = metrics(run)
    first = statistics.median(a[1] - a[0] for a in answers)
    each = statistics.median((a[2] - a[1]) / 11 for a in answers)
    seen = statistics.median(r.arrivals[0] - r.sent for r in run.records)
    # 1% or 2 ms; medians, so that a pause of a busy machine does not decide
    assert seen == pytest.approx(first, rel=0.01, abs=0.002)
    assert found["latency"]["ttft"]["p50"] >= seen
    assert found["latency"]["tpot"]["p50"] == pytest.approx(each, rel=0.01, abs=0.002)
    assert found["latency"]["itl"]["p50"] == pytest.approx(0.03, abs=0.002)
    assert first >= 0.299
    assert found["tokens"] == {
        "input": 30_000,
        "cached": None,
        "computed": None,
        "output": 360,
        "exact_input": True,
        "exact_output": True,
    }
    assert all(r.counts == [1] * 12 for r in run.records)
    assert run.client["lag"]["send"]["p50"] < found["latency"]["e2e"]["mean"]


def test_open_loop_sends_on_time_and_counts_from_then() -> None:
    """One slot, 0.1 s each: the wait of the later ones is in their latency."""
    jobs = [Job(((i, 8),), 1, at=0.0) for i in range(4)]
    run = go(Profile(ttft=Curve(base=0.1), slots=1), Workload(jobs, {}), Load())
    assert [r.scheduled for r in run.records] == [0.0] * 4
    late = sorted(ttft(r) or 0 for r in run.records)
    assert all(t >= 0.099 * n for n, t in enumerate(late, start=1))
    capped = go(Profile(ttft=Curve(base=0.1)), Workload(jobs, {}), Load(concurrency=1))
    assert metrics(capped)["in_flight"]["most"] == 1
    assert max(r.sent for r in capped.records) >= 0.299
    assert max(ttft(r) or 0 for r in capped.records) >= 0.399
    # waiting for a slot is no lag of the client's
    assert capped.client["lag"]["send"]["max"] < 0.29


def test_no_request_is_sent_before_its_time(stub: str) -> None:
    run = run_load(shapes(60), Load(rate=200.0, burstiness=0.5), Target(stub, seed=1))
    assert all(r.sent >= r.scheduled for r in run.records)
    assert len({r.scheduled for r in run.records}) == 60


def test_closed_loop_keeps_its_concurrency(stub: str) -> None:
    run = run_load(shapes(30), Load(kind="closed", concurrency=5), Target(stub, seed=2), workers=2)
    assert run.client["workers"] == 2
    assert metrics(run)["in_flight"]["most"] == 5
    assert [r.index for r in run.records] == list(range(30))


@pytest.mark.parametrize(
    "fault, status, words",
    [
        ("status", "error", "HTTP 500: a planted failure"),
        ("full", "error", "HTTP 429: queue is full"),
        ("html", "error", "stream ended before the answer was finished"),
        ("close", "error", "closed the connection in the middle of the answer"),
        ("early", "error", "stream ended before the answer was finished"),
        ("invalid", "error", "stream event is not JSON: '{not json'"),
        ("shape", "error", "stream event of another shape"),
        ("error", "error", "error in stream: a planted error"),
        ("abort", "error", "server ended the answer with 'abort'"),
        ("stall", "timeout", "no byte within 0.3 s"),
    ],
)
def test_a_fault_is_counted_and_explained_and_stops_nobody(
    fault: Any, status: str, words: str
) -> None:
    run = go(Profile(faults={fault: 2}), shapes(4), timeout=0.3)
    assert [r.status for r in run.records] == ["ok", status, "ok", status]
    assert words in (run.records[1].error or "")
    found = metrics(run)
    assert found["requests"]["ok"] == 2
    assert sum(found["requests"]["failures"].values()) == 2


def test_a_server_that_closes_at_once() -> None:
    """On a connection that was used before the request is sent once more: it may have been closed
    before the request came."""
    run = go(Profile(faults={"refuse": 1}), shapes(2))
    assert {r.error for r in run.records} == {"the server closed the connection without an answer"}
    run = go(Profile(faults={"refuse": 2}), shapes(2))
    assert [r.status for r in run.records] == ["ok", "ok"]


def test_servers_that_send_no_usage_or_no_done() -> None:
    run = go(Profile(faults={"no_usage": 1}), shapes(2))
    found = metrics(run)
    assert found["requests"]["ok"] == 2
    assert found["tokens"]["output"] == 8  # by stream events
    assert not found["tokens"]["exact_output"]
    assert go(Profile(faults={"no_done": 1}), shapes(1)).records[0].status == "ok"


def test_a_request_may_not_take_for_ever() -> None:
    with stub_server(Profile(itl=Curve(base=0.1))) as url:
        run = run_load(shapes(1, osl=100), ALONE, Target(url, limit=0.5))
    assert (run.records[0].status, run.records[0].error) == ("timeout", "not over within 0.5 s")
    assert run.records[0].end < 5


def test_events_that_bundle_tokens_are_counted() -> None:
    run = go(Profile(chunk=3), shapes(1, osl=8))
    assert run.records[0].counts == [3, 3, 2]
    assert len(run.records[0].arrivals) == 3
    assert tpot(run.records[0]) == pytest.approx(0.001, abs=0.004)


def test_chat_and_text_prompts(stub: str) -> None:
    for prompts in ("chat", "text"):
        target = Target(stub, prompts=prompts, api_key="secret", body={"ignore_eos": None, "n": 1})
        run = run_load(shapes(1, isl=100), ALONE, target)
        assert run.records[0].status == "ok"
        assert run.records[0].counts == [1] * 4
        last = httpx.get(f"{stub}/stats").json()["last"]
        assert last["path"] == ("/v1/chat/completions" if prompts == "chat" else "/v1/completions")
        assert last["headers"]["authorization"] == "Bearer secret"
        assert '"n":1' in last["body"]
        assert "ignore_eos" not in last["body"]
        assert run.records[0].reported_input == 100
        assert "secret" not in str(run)


def test_prefix_groups_are_verified() -> None:
    workload = prefix([64, 256], page=16, requests=4, osl=2)
    with stub_server(Profile(block=16)) as url:
        run = run_load(workload, ALONE, Target(url))
        assert run.server["cache_reset"] == "POST /reset_prefix_cache"
        assert not [reason for reason in run.invalid if "prefix" in reason]
        assert {r.phase for r in run.records} == {"warm", "prime", "measure"}
    with stub_server(Profile(block=16, cache_blocks=4)) as url:
        run = run_load(workload, ALONE, Target(url))
        assert any("256 80%: 0.0% of prompt tokens came from" in x for x in run.invalid)
    with stub_server(Profile()) as url:
        run = run_load(workload, ALONE, Target(url))
        assert any("does not report cached tokens" in reason for reason in run.invalid)


def test_prompts_that_the_server_has_seen_are_told() -> None:
    with stub_server(Profile(block=16)) as url:
        first = run_load(shapes(3), ALONE, Target(url))
        second = run_load(shapes(3), ALONE, Target(url))
        salted = run_load(shapes(3), ALONE, Target(url, salt=5))
    assert any("the server had seen these prompts" in reason for reason in second.invalid)
    assert not any("had seen" in reason for reason in first.invalid + salted.invalid)
    assert salted.client["prompt_salt"] == 5
    assert salted.workload == first.workload


def test_failures_before_the_measurement_are_told() -> None:
    workload = prefix([64], [0.5], page=16, requests=2, osl=2)
    run = go(Profile(block=16, faults={"status": 1}), workload)
    assert any("requests before the measurement failed" in reason for reason in run.invalid)


def test_sessions_wait_and_hit_their_own_past() -> None:
    shape = Sessions(sessions=3, turns=3, system=0, first=64, message=32, osl=3, think=0.1)
    run = go(Profile(block=16), session(shape), Load(kind="closed", concurrency=3))
    for number in range(3):
        turns = [r for r in run.records if r.session == number]
        assert [r.turn for r in turns] == [0, 1, 2]
        thinks = [job.think for job in session(shape).jobs if job.session == number]
        for before, after, think in zip(turns, turns[1:], thinks[1:], strict=False):
            assert after.scheduled - before.end == pytest.approx(think, abs=0.05)
            assert after.cached_tokens == before.input_tokens // 16 * 16


def test_bodies_of_512k_tokens() -> None:
    workload = shapes(3, isl=512 * 1024, osl=4)
    profile = Profile(ttft=Curve(base=0.3), itl=Curve(base=0.05))
    run = go(profile, workload, Load(kind="closed", concurrency=3))
    assert [r.reported_input for r in run.records] == [512 * 1024] * 3
    assert all(r.status == "ok" for r in run.records)


def test_a_run_can_be_stopped(tmp_path: Path) -> None:
    seen = 0

    def count(records: list[Any]) -> None:
        nonlocal seen
        seen += len(records)

    run = go(
        Profile(ttft=Curve(base=0.05), itl=Curve(base=0.05)),
        shapes(500, osl=10),
        Load(kind="closed", concurrency=4),
        on_records=count,
        stop=lambda: seen >= 8,
        out=tmp_path / "r.jsonl",
    )
    found = metrics(run)["requests"]
    assert found["cancelled"] == 4
    assert 8 <= found["ok"] < 100
    kept = read_run(tmp_path / "r.jsonl")
    kept.records.sort(key=lambda r: r.index)
    assert kept == run


def test_a_worker_that_dies_makes_the_run_invalid() -> None:
    killed: list[int] = []

    def kill(_: int) -> None:
        if not killed:
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
            for pid in map(int, children.split()):
                if b"baton.bench.load" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

    run = go(Profile(ttft=Curve(base=0.5)), shapes(5), on_in_flight=kill)
    assert killed
    assert any("a worker process ended with -9" in reason for reason in run.invalid)


def test_a_killed_run_leaves_what_it_had(stub: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    code = (
        "import sys; from pathlib import Path; from baton.bench.load.run import run_load\n"
        "from baton.bench.load.target import Target; from baton.bench.record import Load\n"
        "from baton.bench.workload.job import Job, Workload\n"
        "jobs = [Job(((i, 8),), 4) for i in range(10**4)]\n"
        "run_load(Workload(jobs, {}), Load(kind='closed', concurrency=2), Target(sys.argv[1]),"
        " out=Path(sys.argv[2]))"
    )
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", code, stub, str(file)], env=dict(os.environ, PYTHONPATH=path)
    )
    try:
        while process.poll() is None and not (file.exists() and len(file.read_bytes()) > 5000):
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    run = read_run(file)
    assert len(run.records) > 10
    assert "cut short" in run.invalid[0]


def test_requests_that_cannot_fit_are_refused_before_any_is_sent(stub: str) -> None:
    with stub_server(Profile(max_model_len=100)) as url:
        with pytest.raises(ConfigError, match="99 prompt and 4 output tokens does not fit"):
            run_load(shapes(2, isl=99), ALONE, Target(url))
        assert httpx.get(f"{url}/stats").json()["requests"] == 0


def test_targets_without_sense() -> None:
    for options in ({"timeout": 0}, {"seed": -1}, {"body": {"prompt": "x"}}):
        with pytest.raises(ConfigError):
            Target("http://x", **options)  # type: ignore[arg-type]
    for url in ("", "ftp://x", "http://[", "http://x:99999", "x:port", "http://:8000"):
        with pytest.raises(ConfigError, match="is not the URL of a server: expected http"):
            Target(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_no_server(url: str) -> None:
    with pytest.raises(ServerError):
        ask_server(Target(url))


def test_server_facts(stub: str) -> None:
    assert ask_server(Target(stub)) == {"url": stub, "model": "stub", "max_model_len": 2**20}
    assert ask_server(Target(stub, model="other")) == {"url": stub, "model": "other"}
    for url in ("127.0.0.1:8", "http://127.0.0.1:8/", "http://127.0.0.1:8/v1/"):
        assert api_base(url) == "http://127.0.0.1:8/v1"


def test_a_slow_client_is_told() -> None:
    lag = lag_summary([0.001] * 90 + [0.03] * 10, [0.0] * 100)
    assert judge(lag, 0.1) is not None
    assert judge(lag, 1.0) is None  # 30 ms are below 5%
    assert judge(lag_summary([0.0019] * 100, []), 0.001) is None  # no clock is that good
    assert judge(lag, None) is None
