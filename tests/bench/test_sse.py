"""Server-sent events however they are cut into pieces."""

from __future__ import annotations

import pytest

from baton.bench import sse
from baton.bench.sse import EventParser, ServerError, refusal


def parse(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_in_any_pieces(newline: bytes) -> None:
    lines = [b": comment", b"", b'data: {"a": 1}', b"", b"event: x", b"data:two", b"data: lines"]
    stream = newline.join([*lines, b"", b"", b"data: [DONE]", b"", b""])
    expected = [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    assert parse(stream) == expected
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    assert parse(stream.rstrip()) == expected  # the last blank line is missing


def test_an_event_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT", 100)
    parser = EventParser()
    assert parser.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(ServerError, match="longer"):
        parser.feed(b"x" * 90)


@pytest.mark.parametrize(
    "body, words",
    [
        (b'{"error": {"message": "a  b"}}', "HTTP 500: a b"),
        (b'{"error": "plain"}', "HTTP 500: plain"),
        (b'{"detail": "fastapi"}', "HTTP 500: fastapi"),
        (b"<html>", "HTTP 500: <html>"),
        (b"", "HTTP 500: Oops"),
        (b"\xff", "HTTP 500: \ufffd"),
    ],
)
def test_refusals_in_a_line(body: bytes, words: str) -> None:
    assert str(refusal(500, "Oops", body)) == words
