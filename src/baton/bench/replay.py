"""Open-loop replay of a trace against an OpenAI-compatible server, timed at the client.

A request is sent when the trace says so, whether or not earlier ones were answered, and every
latency counts from the moment it should have been sent: a slow server cannot hide behind a
client that waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.bench.sse import (
    Served,
    ServerError,
    api_base,
    check,
    events,
    explain,
    headers,
    served_model,
)
from baton.bench.trace import Job


@dataclass(frozen=True)
class Target:
    """Where requests go. `timeout` is the longest silence in seconds."""

    base_url: str
    api_key: str | None = None
    timeout: float = 600.0
    max_concurrency: int = 256


@dataclass
class Result:
    """What happened to one request. Times in seconds since the replay began.

    due / sent: when it should have been sent and when it was.
    arrivals: when stream events with a choice came; the first one is the first token.
    output_tokens: from the server's usage, or None when it sent none.
    cached_tokens: prompt tokens the server took from its prefix cache, or None if it says nothing.
    """

    index: int
    prompt_tokens: int
    due: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens; counted by stream events when the server does not say."""
        return len(self.arrivals) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Seconds from due to first token."""
        return self.arrivals[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between stream events."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [after - before for before, after in pairs]


async def ask_model(target: Target) -> Served:
    """What the server serves.

    Raises:
        ServerError: the server cannot be reached, or serves no model.
    """
    async with _client(target) as client:
        return await served_model(client, api_base(target.base_url))


async def replay(
    jobs: Sequence[Job],
    target: Target,
    model: str,
    on_done: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Send every job to `model` at its time; results in job order.

    A request that fails is a Result with `error`; it never stops the others.
    """
    async with _client(target) as client:
        url = f"{api_base(target.base_url)}/completions"
        return await _Sender(client, url, model, target.max_concurrency, on_done).run(jobs)


def _client(target: Target) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(target.timeout, connect=30.0, pool=None),
        limits=httpx.Limits(max_connections=target.max_concurrency, max_keepalive_connections=64),
        headers=headers(target.api_key),
    )


class _Sender:
    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        model: str,
        concurrency: int,
        on_done: Callable[[Result], None],
    ) -> None:
        self._client, self._url, self._model, self._on_done = client, url, model, on_done
        self._free = asyncio.Semaphore(concurrency)
        self._start = 0.0

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        self._start = asyncio.get_running_loop().time()
        results = [Result(i, len(job.prompt), job.at) for i, job in enumerate(jobs)]
        async with asyncio.TaskGroup() as group:
            for job, result in sorted(zip(jobs, results, strict=True), key=lambda pair: pair[0].at):
                await asyncio.sleep(max(0.0, job.at - self._now()))
                group.create_task(self._send(job, result))
        return results

    async def _send(self, job: Job, result: Result) -> None:
        async with self._free:
            result.sent = self._now()
            try:
                await self._stream(job, result)
            except ServerError as error:
                result.error = str(error)
            except httpx.HTTPError as error:
                result.error = explain(error)
            result.end = self._now()
        self._on_done(result)

    async def _stream(self, job: Job, result: Result) -> None:
        body = {
            "model": self._model,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._client.stream("POST", self._url, json=body) as response:
            await check(response)
            async for event in events(response):
                self._take(event, result)
        if result.finish_reason is None:
            raise ServerError("stream ended before the answer was finished")
        if result.finish_reason in {"error", "abort"}:
            raise ServerError(f"server ended the answer with {result.finish_reason!r}")

    def _take(self, event: dict[str, Any], result: Result) -> None:
        try:
            self._read(event, result)
        except (AttributeError, TypeError):
            raise ServerError(f"stream event of another shape: {str(event)[:80]}") from None

    def _read(self, event: dict[str, Any], result: Result) -> None:
        for choice in event.get("choices") or ():
            result.arrivals.append(self._now())
            result.finish_reason = choice.get("finish_reason") or result.finish_reason
        usage = event.get("usage")
        if usage:
            result.output_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            result.cached_tokens = details.get("cached_tokens")
