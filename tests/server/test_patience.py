"""Clients that send requests slowly do not hold connections for ever; others are left alone."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from helpers.fake_engine import FakeEngine, Script
from helpers.serving import Running, running

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


def head(length: int) -> bytes:
    return f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


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
    said = b""
    try:
        while piece := client.recv(4096):
            said += piece
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    "data", [b"", b"GET /health HTTP/1.1\r\nx: " + b"y" * 500, head(9999) + b" " * 500]
)
def test_a_request_that_comes_too_slowly_is_ended(hasty: Running, data: bytes) -> None:
    with connect(hasty) as client:
        if data.startswith(b"POST"):  # only its body is slow
            client.sendall(data[:-500])
            data = data[-500:]
        assert trickle(client, data).startswith(b"HTTP/1.1 408 ")
    assert hasty.post(TEXT, prompt="abc", max_tokens=3).status_code == 200


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
