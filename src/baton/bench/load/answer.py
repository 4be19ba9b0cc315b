"""One streamed answer, read into a record."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.bench.record import Record
from baton.bench.sse import DONE, EventParser, ServerError, error_message, not_json, refusal, shown

#: bytes of an error's body that are kept
KEPT = 64 * 1024


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Reader:
    """Reads a stream's events into `record`; times are seconds after `start` on the monotonic
    clock. `finish` says whether the answer was whole."""

    def __init__(self, record: Record, start: float) -> None:
        self._record, self._start = record, start
        self._events = EventParser()
        self._status, self._reason = 0, ""
        self._body = b""
        self._done = False

    def on_status(self, status: int, reason: str) -> None:
        """Remember it: an error's body says more."""
        self._status, self._reason = status, reason

    def on_body(self, data: bytes, now: float) -> None:
        """Take the events that `data` completes.

        Raises:
            ServerError: an event is not what it should be, or is an error.
        """
        if self._status != 200:
            self._body = (self._body + data)[:KEPT]
            return
        for event in self._events.feed(data):
            self._take(event, now - self._start)

    def finish(self) -> None:
        """The answer has ended.

        Raises:
            ServerError: it was refused, or broke off.
        """
        if self._status != 200:
            raise refusal(self._status, self._reason, self._body)
        for event in self._events.end():
            self._take(event, self._record.arrivals[-1] if self._record.arrivals else 0.0)
        reason = self._record.finish_reason
        if reason is None and not self._done:
            raise ServerError("stream ended before the answer was finished")
        if reason in ("error", "abort"):
            raise ServerError(f"server ended the answer with {reason!r}")

    def _take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            event = _decode(data)
        except msgspec.ValidationError:
            raise ServerError(f"stream event of another shape: {shown(data)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise not_json(data) from None
        if event.error:
            raise ServerError(f"error in stream: {error_message({'error': event.error})}")
        record = self._record
        before = record.output_tokens
        if event.usage is not None:
            self._usage(event.usage)
        ended = False
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                record.finish_reason, ended = choice.finish_reason, True
        if event.choices and self._has_tokens(event, before, ended):
            record.arrivals.append(now)

    def _has_tokens(self, event: _Event, before: int | None, ended: bool) -> bool:
        """Whether an event carries tokens, counting them where its usage grows."""
        record = self._record
        if (
            event.usage is not None
            and event.usage.completion_tokens is not None
            and not (ended and before is None and record.arrivals)
        ):
            new = event.usage.completion_tokens - (before or 0)
            if new > 0:
                record.counts.append(new)
            return new > 0
        # without counts: text, or an event of its own for a token that has none yet; the first
        # event of a chat names the role only, and the last one may only say why it ended
        plain = False
        for choice in event.choices or ():
            delta = choice.delta
            if choice.text or (
                delta
                and (
                    delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
                )
            ):
                return True
            plain = plain or (choice.text is not None and not ended)
        return plain

    def _usage(self, usage: _Usage) -> None:
        record = self._record
        record.reported_input = usage.prompt_tokens
        if usage.completion_tokens is not None:
            record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
