"""One answer of the stub: waits as programmed, tokens, and what goes wrong."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from baton.bench.stub.profile import Fault

if TYPE_CHECKING:
    from baton.bench.stub.state import State

clock = time.monotonic


class Client(Protocol):
    """The connection that an answer goes to."""

    def start(self) -> None:
        """Send the head of a stream."""

    def event(self, data: bytes) -> None:
        """Send part of a stream."""

    def end(self) -> None:
        """End the stream."""

    def whole(self, status: int, body: Any) -> None:
        """Send a complete answer."""

    def drop(self) -> None:
        """Break the connection."""


class Request(msgspec.Struct):
    """What the stub reads of a body; the prompt stays text until someone needs its ids."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None


class Answer:
    """Answers `request`, whose first byte came when it `arrived`; `cancel` when its client has
    gone."""

    def __init__(
        self,
        state: State,
        client: Client,
        request: Request,
        prompt: tuple[int, tuple[int, ...], int],
        fault: Fault | None,
        arrived: float,
    ) -> None:
        self._state, self._client, self._request, self._fault = state, client, request, fault
        self.tokens, self.chain, self.cached = prompt
        self.arrived = arrived
        self.wrote: list[float] = []
        self._count = request.max_tokens or 16
        self._chunk = state.profile.chunk
        self._sent = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        options = request.stream_options or {}
        self._usage = bool(options.get("include_usage")) and fault != "no_usage"
        self._each = bool(options.get("continuous_usage_stats")) and fault != "no_usage"
        self._head = state.event_head(chat=request.messages is not None)

    def begin(self, now: float) -> None:
        """It has a slot: the first token comes after prefill and TTFT."""
        if self._fault == "stall" and self._count < 2:
            return
        self._due = self._state.first_token(self, now)
        self._wait()

    def cancel(self) -> None:
        """No more events."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        delay = self._due - clock()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._emit)

    def _emit(self) -> None:
        if not self._sent:
            self._state.prefilled(self)
            if self._request.stream:
                self._client.start()
        if self._sent * 2 >= self._count and self._breaks():
            return
        new = min(self._chunk, self._count - self._sent)
        self._sent += new
        self.wrote.append(clock())
        if self._request.stream:
            self._client.event(self._event(self._sent == self._count, new))
        if self._sent == self._count:
            self._finish()
            return
        self._due += self._state.gap(self) * min(self._chunk, self._count - self._sent)
        self._wait()

    @property
    def context(self) -> int:
        """Tokens so far."""
        return self.tokens + self._sent

    def _event(self, last: bool, new: int) -> bytes:
        reason = b"null"
        if last:
            reason = b'"abort"' if self._fault == "abort" else b'"length"'
        usage = self._usage_json() if self._each else b"null"
        return b"".join(
            (self._head[0], b" t" * new, self._head[1], reason, b'}],"usage":', usage, b"}\n\n")
        )

    def _usage_json(self) -> bytes:
        cached = b',"prompt_tokens_details":{"cached_tokens":%d}' % self.cached
        return b'{"prompt_tokens":%d,"completion_tokens":%d%b}' % (
            self.tokens,
            self._sent,
            cached if self._state.profile.block else b"",
        )

    def _breaks(self) -> bool:
        """Do what the fault says in the middle of the stream; whether that ends it."""
        if self._fault not in ("close", "early", "stall", "invalid", "shape", "error"):
            return False
        odd = {
            "invalid": b"data: {not json\n\n",
            "shape": b'data: {"choices":["what"]}\n\n',
            "error": b'data: {"error":{"message":"a planted error"}}\n\n',
        }
        if self._fault == "stall":
            return True
        if self._fault == "close":
            self._client.drop()
        else:
            if self._fault in odd:
                self._client.event(odd[self._fault])
            self._client.end()
        self._state.ended(self)
        return True

    def _finish(self) -> None:
        if not self._request.stream:
            usage = msgspec.json.decode(self._usage_json())
            choice = {"index": 0, "text": " t" * self._count, "finish_reason": "length"}
            if self._request.messages is not None:
                message = {"role": "assistant", "content": choice.pop("text")}
                choice["message"] = message
            self._client.whole(200, {"choices": [choice], "usage": usage})
        else:
            if self._usage:
                usage_event = b'data: {"choices":[],"usage":%b}\n\n' % self._usage_json()
                self._client.event(usage_event)
            if self._fault != "no_done":
                self._client.event(b"data: [DONE]\n\n")
            self._client.end()
        self._state.ended(self)
