"""Server-sent events of OpenAI-style streams, and errors of such servers in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from baton.core.errors import BatonError, ConfigError

DONE = b"[DONE]"
#: bytes without an end of event after which a stream is given up
LONGEST_EVENT = 4 * 2**20


class ServerError(BatonError):
    """A server could not be reached, refused a request or broke a stream."""


class EventParser:
    """Bytes of a stream in, data of its events out. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that `data` completes.

        Raises:
            ServerError: an event does not end.
        """
        text = self._rest + data if self._rest else data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > LONGEST_EVENT:
            raise ServerError(f"stream event longer than {LONGEST_EVENT >> 20} MiB")
        return [found for block in blocks if (found := _data(block))]

    def end(self) -> list[bytes]:
        """Data of an event that the stream ended without the blank line after it."""
        rest, self._rest = self._rest, b""
        return [found] if (found := _data(rest)) else []


def _data(block: bytes) -> bytes:
    if block.startswith(b"data:") and b"\n" not in block:
        return block[5:].strip()  # the usual event: one line
    lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream, until `[DONE]` or the end of the body.

    Raises:
        ServerError: an event is not JSON, or is an error object.
        httpx.HTTPError: the connection broke.
    """
    parser = EventParser()
    async for chunk in response.aiter_bytes():
        for data in parser.feed(chunk):
            if data == DONE:
                return
            yield _event(data)
    for data in parser.end():
        if data != DONE:
            yield _event(data)


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise not_json(data) from None
    if not isinstance(event, dict):
        raise ServerError(f"stream event is not an object: {shown(data)}")
    if event.get("error"):
        raise ServerError(f"error in stream: {error_message(event)}")
    return event


def not_json(data: bytes) -> ServerError:
    """What to raise for an event that is not JSON."""
    return ServerError(f"stream event is not JSON: {shown(data)}")


def shown(data: bytes) -> str:
    """The begin of some bytes, quoted, for an error."""
    return repr(data[:80].decode(errors="replace"))


def error_message(body: Any) -> str:
    """The message of an OpenAI error body, or the body itself, cut to a line."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:200]


def refusal(status: int, reason: str, body: bytes) -> ServerError:
    """What to raise for an answer that is not a success."""
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = error_message(body.decode(errors="replace"))
    return ServerError(f"HTTP {status}: {message or reason}")


async def check(response: httpx.Response) -> None:
    """Raise ServerError with status and message unless the (streamed) response is a success."""
    if not response.is_success:
        raise refusal(response.status_code, response.reason_phrase, await response.aread())


def explain(error: Exception) -> str:
    """One line for a transport error, whose own text is often empty."""
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def api_base(url: str) -> str:
    """`http://host:port/v1` from a server's address with or without scheme and `/v1`."""
    url = url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    return url if url.endswith("/v1") else f"{url}/v1"


def headers(api_key: str | None) -> dict[str, str]:
    """Authorization header, if there is a key.

    Raises:
        ConfigError: the key is none that a header can carry.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("the API key must be printable ASCII")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@dataclass(frozen=True)
class Served:
    """A model as a server reports it; the last two are None where it does not say. Baton says its
    fingerprint field by field."""

    name: str
    max_model_len: int | None = None
    fingerprint: Any = None


async def served_model(client: httpx.AsyncClient, base: str, wanted: str | None = None) -> Served:
    """The model of that name as the server lists it, or only its name where it does not: some
    servers load on demand what they do not list. Without a name, the first model.

    Raises:
        ServerError: no server there, or it lists nothing and no name was given.
    """
    try:
        response = await client.get(f"{base}/models")
    except httpx.HTTPError as error:
        raise ServerError(f"no server answers at {base}: {explain(error)}") from None
    except httpx.InvalidURL as error:
        raise ServerError(f"{base} is not a URL: {error}") from None
    cards: dict[str, Any] = {}
    if response.is_success:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            cards = {str(card["id"]): dict(card) for card in response.json()["data"]}
    if wanted is None:
        await check(response)
        if not cards:
            raise ServerError(f"{base}/models does not list a model")
    name = next(iter(cards)) if wanted is None else wanted
    card = cards.get(name, {})
    return Served(name, card.get("max_model_len"), card.get("fingerprint"))
