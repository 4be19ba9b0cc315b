"""Load on servers that speak bad HTTP: each request ends with a reason, none hangs, none is mixed
up with another."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.record import Load
from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Curve, Profile
from baton.bench.workload.job import Job, Workload

MODELS = b'{"data":[{"id":"m"}]}'
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n'
PING, HANG_UP = b": ping\n\n", b"hang up"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Gives every POST the same bytes; pings go on for ever, HANG_UP ends the connection."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    size = b"Content-Length: %d\r\n\r\n" % len(MODELS)
                    writer.write(b"HTTP/1.1 200 OK\r\n" + size + MODELS)
                    continue
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
                writer.write(answer.removesuffix(HANG_UP))
                while answer.endswith(PING):
                    writer.write(chunk(PING))
                    await asyncio.sleep(0.05)
                if answer.endswith(HANG_UP):
                    return writer.close()

    loop, urls, done = asyncio.new_event_loop(), [], asyncio.Event()
    ready = threading.Event()

    async def serve() -> None:
        made = await asyncio.start_server(client, "127.0.0.1", 0)
        urls.append(f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}")
        ready.set()
        await done.wait()
        made.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"\x00\xff garbage \r\n\r\n", "not an HTTP answer"),
        (OK + b"zz\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204: No Content"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "HTTP 302: Found"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 9, "no byte within 1 s"),
        (OK + chunk(EVENT) + chunk(b"data: \xff\n\n") + b"0\r\n\r\n", "stream event is not JSON"),
        (OK + chunk(b"x" * 5_000_000), "stream event longer than 4 MiB"),
        (OK + chunk(b'data: {"choices":[{"text":5}]}\n\n') + b"0\r\n\r\n", "another shape"),
        (OK + chunk(PING) + PING, "not"),
        (OK + chunk(EVENT) + HANG_UP, "closed the connection in the middle"),
        (HANG_UP, "closed the connection without an answer"),
    ],
)
def test_garbage_is_explained(answer: bytes, words: str) -> None:
    with server(answer) as url:
        target = Target(url, timeout=1.0, limit=1.5)
        jobs = [Job(((i, 8),), 4) for i in range(6)]
        run = run_load(Workload(jobs, {}), Load(kind="closed", concurrency=3), target)
    assert [r.index for r in run.records] == list(range(6))
    assert all(r.status in ("error", "timeout") and words in (r.error or "") for r in run.records)


def test_an_answer_may_end_with_its_connection() -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\n" + EVENT + LAST + HANG_UP) as url:
        run = run_load(
            Workload([Job(((0, 8),), 4)], {}), Load(kind="closed", concurrency=1), Target(url)
        )
    assert run.records[0].status == "ok"
    assert len(run.records[0].arrivals) == 2


def test_connections_closed_between_requests_mix_nothing_up() -> None:
    """Requests that find their connection closed are sent again on another. Each has a length of
    its own, which the server counts."""
    jobs = [Job(((i, 10 + i),), 4) for i in range(120)]
    profile = Profile(ttft=Curve(base=0.02), itl=Curve(base=0.01), faults={"close": 5, "refuse": 4})
    with stub_server(profile) as url:
        target = Target(url, timeout=5.0)
        run = run_load(Workload(jobs, {}), Load(kind="closed", concurrency=8), target)
    assert [r.index for r in run.records] == list(range(120))
    good = [r for r in run.records if r.status == "ok"]
    assert len(good) > 60
    assert all(r.reported_input == r.input_tokens for r in good)
    assert all(len(r.arrivals) == 4 for r in good)
    closed = "the server closed the connection in the middle of the answer"
    refused = "the server closed the connection without an answer"
    assert {r.error for r in run.records} <= {None, closed, refused}
