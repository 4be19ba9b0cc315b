"""What the server needs from the engine: the part of `AsyncEngine` and `Tokenizer` it calls.

The server is written against these protocols and never against the engine's insides, so that it
can be tested with a fake engine and put in front of a remote one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from baton.config.engine import EngineConfig
from baton.core.request import Output
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats

EngineState = Literal["starting", "ready", "restarting", "draining", "dead"]


class Stream(Protocol):
    """Deltas of one prompt. Iterating raises RequestFailed or Unavailable when it cannot go on."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def cancel(self) -> None:
        """Abort the request in the engine; harmless when it has finished."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, special: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special: bool = True) -> str: ...

    def token(self, token_id: int) -> str: ...

    def chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kw: Any
    ) -> list[int]: ...


class Fingerprint(Protocol):
    """Identity of what is served."""

    @property
    def digest(self) -> str: ...


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def state(self) -> EngineState: ...

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

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and return when the running ones are done, or after `timeout`."""

    async def stop(self) -> None:
        """End the engine; streams that still run raise Unavailable."""
