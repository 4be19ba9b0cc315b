"""One HTTP request's generations: submitted together, merged, cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import BatonError, RequestFailed
from baton.core.request import Completion, FinishReason, Output, PositionLogprobs
from baton.core.sampling import SamplingParams
from baton.server.metrics import StreamMeter
from baton.server.prompts import Prompt
from baton.server.protocol import EngineClient, Stream
from baton.server.state import ServerState


@dataclass
class Choice:
    """One whole answer, gathered from deltas."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Completion) -> None:
        """Append what is new."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason.value, delta.stop_reason


class Job:
    """The streams of one HTTP request: `len(prompts)` of them, `n` answers each.

    Choice `i` of the answer is completion `i % n` of prompt `i // n`. `close()` must be awaited
    on every path; it cancels what still runs.
    """

    def __init__(self, state: ServerState, prompts: Sequence[Prompt], n: int) -> None:
        self.prompts, self.n = prompts, n
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.completion_tokens = 0
        self.created = int(time.time())
        self._cached = [0] * len(prompts)
        self._state = state
        self._streams: list[Stream] = []
        self._finished: set[int] = set()
        self._failed = False

    async def submit(
        self,
        engine: EngineClient,
        sampling: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str,
    ) -> None:
        """Submit every prompt; if the engine refuses one, none runs.

        All at once: the engine takes what has come between two steps, so that one by one each
        prompt would wait for a step.
        """
        started: dict[int, Stream] = {}

        async def start(i: int, prompt: Prompt) -> None:
            started[i] = await engine.submit(
                prompt.ids,
                sampling,
                request_id=request_id if len(self.prompts) == 1 else f"{request_id}-{i}",
                priority=priority,
                cache_salt=cache_salt,
            )

        self._state.jobs.add(self)
        try:
            starts = [start(i, prompt) for i, prompt in enumerate(self.prompts)]
            for failure in await asyncio.gather(*starts, return_exceptions=True):
                if failure is not None:
                    raise failure
        except BaseException:
            self._streams = list(started.values())
            await self.close()
            raise
        self._streams = [started[i] for i in range(len(self.prompts))]

    async def outputs(self, arrival: float) -> AsyncIterator[tuple[int, Output]]:
        """`(prompt index, delta)` as they come, until all are finished or one fails."""
        meters = [StreamMeter(self._state.metrics, arrival) for _ in self._streams]
        try:
            async for i, output in _merge(self._streams):
                meters[i].update(output)
                self._cached[i] = output.cached_tokens
                for completion in output.completions:
                    self.completion_tokens += len(completion.token_ids)
                if output.finished:
                    self._finished.add(i)
                yield i, output
            if len(self._finished) < len(self._streams):
                raise RequestFailed("the engine ended the answer early")
        except BatonError:
            self._failed = True
            raise

    async def close(self) -> None:
        """Cancel what still runs. Safe to call twice."""
        self._state.jobs.discard(self)
        left = [s for i, s in enumerate(self._streams) if i not in self._finished]
        self._finished.update(range(len(self._streams)))
        reason = FinishReason.ERROR if self._failed else FinishReason.ABORT
        self._state.metrics.finished[reason.value] += len(left) * self.n
        await asyncio.gather(*(stream.cancel() for stream in left), return_exceptions=True)

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    async def collect(
        self, arrival: float
    ) -> tuple[list[Choice], list[list[PositionLogprobs | None] | None]]:
        """All answers, whole, and each prompt's log-probabilities."""
        choices = [Choice(i) for i in range(len(self.prompts) * self.n)]
        prompt_logprobs: list[list[PositionLogprobs | None] | None] = [None] * len(self.prompts)
        async for i, output in self.outputs(arrival):
            if output.prompt_logprobs is not None:
                prompt_logprobs[i] = output.prompt_logprobs
            for completion in output.completions:
                choices[i * self.n + completion.index].add(completion)
        return choices, prompt_logprobs


async def _merge(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Output]]:
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
            if output.finished:
                break
        return
    # Of one: what comes while the reader is busy waits in its stream, where it is one delta.
    queue: asyncio.Queue[tuple[int, Output | Exception | None]] = asyncio.Queue(1)

    async def pump(i: int, stream: Stream) -> None:
        try:
            async for output in stream:
                await queue.put((i, output))
                if output.finished:
                    break
            await queue.put((i, None))
        except Exception as error:
            await queue.put((i, error))

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            i, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield i, item
    finally:
        for task in pumps:
            task.cancel()
