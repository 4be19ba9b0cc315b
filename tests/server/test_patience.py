"""Clients that send requests slowly do not hold connections for ever; others are left alone."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from baton.server import process
from helpers.fake_engine import FakeEngine, Script
from helpers.serving import Running, running, wait_until

SECONDS = 0.4
TEXT = "/v1/completions"
BODY = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with running(request_timeout="400ms") as server:
        yield server


def connect(server: Running) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(length: int, path: str = TEXT, method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


CHUNKED = head(1).replace(b"content-length: 1", b"transfer-encoding: chunked")


def answer(client: socket.socket) -> bytes:
    """The next whole response."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += more(client)
    top, _, body = got.partition(b"\r\n\r\n")
    length = int(top.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += more(client)
    return got


def more(client: socket.socket) -> bytes:
    said = client.recv(1 << 16)
    assert said, "the server closed the connection"
    return said


def trickle(client: socket.socket, data: bytes) -> bytes:
    """Send a byte now and then until the server has had enough; what it said."""
    begin = time.monotonic()
    try:
        for byte in data:
            client.sendall(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() - begin < 15, "it never had enough"
    except OSError:
        pass
    return rest(client)


def rest(client: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    said = b""
    try:
        while piece := client.recv(4096):
            said += piece
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    "data", [b"GET /health HTTP/1.1\r\nx: " + b"y" * 500, head(9999) + b" " * 500]
)
def test_a_request_that_comes_too_slowly_is_ended(hasty: Running, data: bytes) -> None:
    with connect(hasty) as client:
        if data.startswith(b"POST"):  # only its body is slow
            client.sendall(data[:-500])
            data = data[-500:]
        assert trickle(client, data).startswith(b"HTTP/1.1 408 ")
    assert hasty.post(TEXT, prompt="abc", max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (head(1 << 40, "/nothing"), b"404"),
        (head(1 << 40), b"413"),
        (head(9, "/health", "GET"), b"200"),
        (head(9, "/health", "HEAD"), b"405"),
        (CHUNKED.replace(TEXT.encode(), b"/nothing") + b"5\r\nab", b"404"),
    ],
)
@pytest.mark.parametrize("end", [b" ", b"zz\r\n"])
def test_one_that_has_its_answer_before_its_body_gets_no_other(
    hasty: Running, data: bytes, code: bytes, end: bytes
) -> None:
    """Neither when its body never ends, nor when it is not what the head says."""
    with connect(hasty) as client:
        client.sendall(data)
        said = client.recv(4096)
        client.sendall(end)
        said += rest(client)
    assert said.startswith(b"HTTP/1.1 " + code)
    assert said.count(b"HTTP/1.1 ") == 1


def test_the_request_behind_one_that_was_refused_early_is_told(hasty: Running) -> None:
    with connect(hasty) as client:
        client.sendall(head(50, "/nothing"))
        assert answer(client).startswith(b"HTTP/1.1 404")
        client.sendall(b" " * 50)
        assert trickle(client, head(9999)).startswith(b"HTTP/1.1 408 ")


def test_what_is_not_http_is_told_but_not_in_the_middle_of_an_answer(hasty: Running) -> None:
    with connect(hasty) as client:
        client.sendall(b"hello?\r\n\r\n")
        assert rest(client).startswith(b"HTTP/1.1 400 ")
    body = json.dumps({"prompt": "abc", "max_tokens": 9, "stream": True}).encode()
    hasty.engine.script.hang_after = 1
    try:
        with connect(hasty) as client:
            client.sendall(head(len(body)) + body)
            said = more(client)
            client.sendall(b"hello?\r\n\r\n")
            said += rest(client)
    finally:
        hasty.reset()
    assert said.count(b"HTTP/1.1 ") == 1


def test_what_follows_a_request_is_not_its_answer(hasty: Running) -> None:
    """A request that waits for its answer, and bytes behind it that are not HTTP."""
    hasty.engine.script.hang_after = 1
    try:
        with connect(hasty) as client:
            client.sendall(head(len(BODY)) + BODY + b"hello?\r\n\r\n")
            said = rest(client)
    finally:
        hasty.reset()
    assert b"HTTP/1.1 400" not in said


def test_so_is_a_later_one_on_the_same_connection(hasty: Running) -> None:
    with connect(hasty) as client:
        client.sendall(head(len(BODY)) + BODY)
        assert answer(client).startswith(b"HTTP/1.1 200")
        time.sleep(2 * SECONDS)  # idle between requests: the keep-alive's business
        client.sendall(head(len(BODY)) + BODY)
        assert answer(client).startswith(b"HTTP/1.1 200")
        assert trickle(client, head(len(BODY)) * 9).startswith(b"HTTP/1.1 408 ")


def test_a_body_has_time_for_its_length(hasty: Running) -> None:
    padded = BODY[:-1] + b" " * 49152 + BODY[-1:]  # three seconds more
    with connect(hasty) as client:
        client.sendall(head(len(padded)) + padded[:40960])
        time.sleep(2 * SECONDS)
        client.sendall(padded[40960:])
        assert answer(client).startswith(b"HTTP/1.1 200")


def test_answers_may_take_their_time() -> None:
    engine = FakeEngine(script=Script(first_delay=3 * SECONDS))
    with running(engine, request_timeout="400ms") as server, connect(server) as client:
        client.sendall(head(len(BODY)) + BODY)
        # the next one comes too early: it is read only when the first is answered
        client.sendall(head(len(BODY)))
        assert answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(BODY)
        assert answer(client).startswith(b"HTTP/1.1 200")


def test_waiting_for_an_answer_takes_nothing_from_the_next_request() -> None:
    engine = FakeEngine(script=Script(first_delay=3.5))
    with running(engine, request_timeout="2s") as server, connect(server) as client:
        client.sendall(head(len(BODY)) + BODY)
        client.sendall(head(len(BODY)))
        assert answer(client).startswith(b"HTTP/1.1 200")
        time.sleep(1.0)  # of the two seconds from now on, and behind the two from the head on
        client.sendall(BODY)
        assert answer(client).startswith(b"HTTP/1.1 200")


def test_the_time_of_the_first_request_counts_from_its_first_byte() -> None:
    with running(request_timeout="2s") as server, connect(server) as client:
        time.sleep(1.5)
        client.sendall(head(len(BODY)))
        time.sleep(1.0)
        client.sendall(BODY)
        assert answer(client).startswith(b"HTTP/1.1 200")


def test_what_came_with_the_head_counts_as_body_too(hasty: Running) -> None:
    padded = BODY[:-1] + b" " * 49152 + BODY[-1:]  # three seconds more
    with connect(hasty) as client:
        client.sendall(head(len(BODY)) + BODY)
        assert answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(head(len(padded)) + padded[:-1])
        time.sleep(3 * SECONDS)
        client.sendall(padded[-1:])
        assert answer(client).startswith(b"HTTP/1.1 200")


def test_a_head_has_no_time_for_its_length(hasty: Running) -> None:
    with connect(hasty) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 49152)
        client.settimeout(2.5)
        assert rest(client).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent", ["nothing", "empty lines", "a request", "a body after its answer", "a part of one"]
)
def test_an_idle_connection_is_closed_without_a_word(
    sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "KEEP_ALIVE", 2)
    with running() as server, connect(server) as client:
        if sent == "empty lines":
            client.sendall(b"\r\n\r\n")
        elif sent == "a request":
            client.sendall(head(len(BODY)) + BODY)
            assert answer(client).startswith(b"HTTP/1.1 200")
        elif sent != "nothing":
            client.sendall(head(5, "/nothing"))
            assert answer(client).startswith(b"HTTP/1.1 404")
            client.sendall(b"12345" if sent == "a body after its answer" else b"1")
        assert rest(client) == b""


def test_every_request_of_a_client_that_leaves_is_ended() -> None:
    engine = FakeEngine(script=Script(hang_after=1))
    with running(engine) as server:
        with connect(server) as client:
            client.sendall((head(len(BODY)) + BODY) * 3)
            wait_until(lambda: engine.running == 1)
        wait_until(lambda: len(engine.cancelled) == 1)
        assert len(engine.seen) == 1
