"""What the server needs from the engine: the part of `AsyncEngine` and `Tokenizer` it calls.

The server is written against these protocols and never against the engine's insides, so that it
can be tested with a fake engine and put in front of a remote one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from baton.config.fingerprint import Fingerprint
from baton.core.request import Output
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats

EngineState = Literal["starting", "ready", "unresponsive", "restarting", "draining", "dead"]


class Stream(Protocol):
    """Deltas of one prompt. Iterating raises RequestFailed or Unavailable when it cannot go on."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def cancel(self) -> None:
        """Abort the request in the engine; harmless when it has finished."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, special: bool = True, most_tokens: int | None = None) -> list[int]:
        """Ids of a text; RequestError, before the work, when it is certain to have too many."""

    def decode(self, ids: list[int], skip_special: bool = True) -> str: ...

    def token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
        **kw: Any,
    ) -> list[int]:
        """Ids of a conversation; RequestError when the template refuses it, or it is too long."""


class EngineInfo(Protocol):
    """Facts about the engine; lengths in tokens."""

    @property
    def model(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def reason(self) -> str:
        """Why no requests are taken, for people; empty when the engine is ready."""

    async def submit(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Stream:
        """Accept a request, or raise RequestError, QueueFull or Unavailable."""

    async def stats(self) -> EngineStats: ...

    async def dead(self) -> str:
        """Wait until the engine has died for good; returns why."""

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and return when the running ones are done, or after `timeout`."""

    async def stop(self) -> None:
        """End the engine; streams that still run raise Unavailable."""
