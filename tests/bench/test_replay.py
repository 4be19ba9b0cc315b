"""Replay against servers that behave and servers that do not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console

from baton.bench.replay import Result, Target, ask_model, replay
from baton.bench.replay_report import summarize, table, write_json
from baton.bench.sse import ServerError, api_base
from baton.bench.trace import Job
from helpers import stub_server as stub
from helpers.stub_server import Stub


def go(jobs: list[Job], server: Stub, **options: object) -> list[Result]:
    async def run() -> list[Result]:
        async with server.serving():
            target = Target(server.url, **options)  # type: ignore[arg-type]
            return await replay(jobs, target, (await ask_model(target)).name)

    return asyncio.run(run())


def job(mode: int = stub.GOOD, at: float = 0.0, tokens: int = 4) -> Job:
    return Job(at, [mode] + [7] * 9, tokens)


def test_numbers_of_a_good_run() -> None:
    server = Stub(delay=0.02)
    results = go([job(), job(at=0.1)], server)
    for result in results:
        assert result.error is None
        assert (result.tokens, result.cached_tokens, result.prompt_tokens) == (4, 5, 10)
        assert 0.02 <= result.ttft < 0.5
        assert result.tpot is not None
        assert 0.02 <= result.tpot < 0.5
    assert results[1].sent >= 0.1
    body = server.bodies[0]
    assert body["model"] == "stub-model"
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    summary = summarize(results)
    assert summary.prefix_hit == 0.5
    assert summary.output_tokens == 8
    assert summary.exact_tokens
    assert summary.latency["itl"]["p50"] >= 0.02


def test_latency_counts_from_when_a_request_was_due() -> None:
    server = Stub(delay=0.05)
    results = go([job(tokens=4) for _ in range(3)], server, max_concurrency=1)
    assert server.most == 1
    assert results[2].sent >= 0.35  # it waited for two requests of 0.2 s
    assert results[2].ttft >= 0.4
    assert summarize(results).late >= 0.35


@pytest.mark.parametrize(
    "mode, words",
    [
        (stub.EARLY, "ended before the answer was finished"),
        (stub.CUT, "RemoteProtocolError"),
        (stub.ERROR_EVENT, "row is not finite"),
        (stub.FULL, "HTTP 429: queue is full"),
        (stub.ODD, "another shape"),
        (stub.GARBAGE, "not JSON"),
        (stub.ABORTED, "'abort'"),
    ],
)
def test_one_failure_is_explained_and_stops_nobody(mode: int, words: str) -> None:
    results = go([job(mode), job(), job(mode)], Stub())
    assert words in (results[0].error or "")
    assert results[1].error is None
    summary = summarize(results)
    assert (summary.requests, summary.failed) == (3, 2)
    assert list(summary.failures.values()) == [2]


def test_no_usage_is_said_and_tokens_are_counted() -> None:
    summary = summarize(go([job(stub.NO_USAGE)], Stub()))
    assert summary.failed == 0
    assert summary.output_tokens == 4
    assert not summary.exact_tokens
    assert summary.prefix_hit is None


def test_a_finished_answer_without_done_counts() -> None:
    assert go([job(stub.NO_DONE)], Stub())[0].error is None


def test_key_is_sent() -> None:
    server = Stub()
    go([job()], server, api_key="secret")
    assert "authorization: bearer secret" in server.headers[0].lower()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "127.0.0.1:1"])
def test_no_server(url: str) -> None:
    with pytest.raises(ServerError):
        asyncio.run(ask_model(Target(url)))


def test_api_base() -> None:
    for url in ("127.0.0.1:8", "http://127.0.0.1:8/", "http://127.0.0.1:8/v1/"):
        assert api_base(url) == "http://127.0.0.1:8/v1"


def test_table_fits_and_json_is_whole(tmp_path: Path) -> None:
    results = go([job(), job(stub.FULL), job(stub.EARLY), job(stub.NO_USAGE)], Stub())
    summary = summarize(results)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(summary, "a title"))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 100
    for word in ("TTFT", "TPOT", "ITL", "E2E", "p99", "queue is full", "2 failed", "50.0%"):
        assert word in text
    out = tmp_path / "new" / "out.json"
    write_json(out, summary, results, {"target": {"model": "m"}})
    document = json.loads(out.read_text())
    assert document["summary"]["failed"] == 2
    assert len(document["requests"]) == 4
    assert document["target"] == {"model": "m"}
    assert document["requests"][1]["ttft"] is None


def test_nothing_answered_still_prints() -> None:
    summary = summarize(go([job(stub.FULL)], Stub()))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(summary, "t"))
    assert "1 failed" in console.export_text()
