"""Server-sent events of OpenAI-style streams, and errors of such servers in one line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from baton.core.errors import BatonError, ConfigError


class ServerError(BatonError):
    """A server could not be reached, refused a request or broke a stream."""


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream, until `[DONE]` or the end of the body.

    Raises:
        ServerError: an event is not JSON, or is an error object.
        httpx.HTTPError: the connection broke.
    """
    data: list[str] = []
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
            continue
        if line or not data:
            continue  # a comment, another field, or a blank line between events
        text, data = "\n".join(data), []
        if text == "[DONE]":
            return
        yield _event(text)
    if data and data != ["[DONE]"]:
        yield _event("\n".join(data))


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except json.JSONDecodeError:
        raise ServerError(f"stream event is not JSON: {text[:80]!r}") from None
    if not isinstance(event, dict):
        raise ServerError(f"stream event is not an object: {text[:80]!r}")
    if event.get("error"):
        raise ServerError(f"error in stream: {error_message(event)}")
    return event


def error_message(body: Any) -> str:
    """The message of an OpenAI error body, or the body itself, cut to a line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:200]


async def check(response: httpx.Response) -> None:
    """Raise ServerError with status and message unless the (streamed) response is a success."""
    if response.is_success:
        return
    await response.aread()
    try:
        message = error_message(response.json())
    except ValueError:
        message = error_message(response.text)
    raise ServerError(f"HTTP {response.status_code}: {message or response.reason_phrase}")


def explain(error: httpx.HTTPError) -> str:
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


async def served_model(client: httpx.AsyncClient, base: str) -> Served:
    """The first model that the server lists.

    Raises:
        ServerError: no server there, or it serves nothing.
    """
    try:
        response = await client.get(f"{base}/models")
        await check(response)
        card = response.json()["data"][0]
        return Served(str(card["id"]), card.get("max_model_len"), card.get("fingerprint"))
    except httpx.HTTPError as error:
        raise ServerError(f"no server answers at {base}: {explain(error)}") from None
    except httpx.InvalidURL as error:
        raise ServerError(f"{base} is not a URL: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError(f"{base}/models does not list a model") from None
