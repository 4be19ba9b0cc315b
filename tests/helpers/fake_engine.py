"""An engine without a model: echoes the prompt, at a programmed pace, with programmed faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import QueueFull, RequestError, RequestFailed, Unavailable
from baton.core.request import (
    Completion,
    FinishReason,
    Output,
    PositionLogprobs,
    Timing,
    TokenLogprob,
)
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats
from baton.server.protocol import EngineState

BOS, EOS, VOCAB = 256, 257, 300


class FakeTokenizer:
    """One token per byte; 256 is BOS, 257 EOS."""

    vocab_size = VOCAB
    eos_ids = (EOS,)
    digest = "bytes"
    chat_template: str | None = "fake"

    def __init__(self) -> None:
        self.chat_kwargs: dict[str, Any] = {}
        self.most_tokens: int | None = -1  # as asked last

    def encode(self, text: str, special: bool = True, most_tokens: int | None = None) -> list[int]:
        return self._encode(text, special, most_tokens, "prompt")

    def _encode(self, text: str, special: bool, most_tokens: int | None, param: str) -> list[int]:
        self.most_tokens = most_tokens
        if most_tokens is not None and len(text) > most_tokens:
            raise RequestError("too long", param=param, code="context_length_exceeded")
        return [BOS] * special + list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        names = {BOS: b"<s>", EOS: b"</s>"}
        pieces = (
            (b"" if skip_special else names.get(i, b"<?>")) if i > 255 else bytes([i]) for i in ids
        )
        return b"".join(pieces).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
        **kw: Any,
    ) -> list[int]:
        self.chat_kwargs = kw
        if messages[0]["role"] == "alien":
            raise RequestError("unknown role alien", param="messages")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        text += "assistant: " * add_generation_prompt
        return self._encode(text, True, most_tokens, "messages")


@dataclass
class Script:
    """How the fake behaves; times in seconds, counts in tokens."""

    first_delay: float = 0.0
    token_delay: float = 0.0
    fail_after: int | None = None  # RequestFailed after this many tokens
    hang_after: int | None = None  # no more tokens after this many, until death or cancel
    end_early_after: int | None = None  # the stream just stops
    queue_full: bool = False
    cached_tokens: int = 0
    delta: int = 1  # tokens per output


@dataclass(frozen=True)
class FakeFingerprint:
    digest: str = "f1e2d3c4b5a697887766554433221100"

    def to_dict(self) -> dict[str, str | int]:
        return {"family": "fake"}


@dataclass(frozen=True)
class FakeInfo:
    model: str = "/models/fake"
    vocab_size: int = VOCAB
    max_model_len: int = 4096


@dataclass
class FakeEngine:
    """Satisfies `server.protocol.EngineClient`. `seen` holds what was submitted."""

    max_model_len: int = 4096
    script: Script = field(default_factory=Script)
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    fingerprint: FakeFingerprint = field(default_factory=FakeFingerprint)
    state: EngineState = "ready"
    seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    totals: EngineStats = field(default_factory=lambda: EngineStats(kv_pages_total=100))
    died: asyncio.Event = field(default_factory=asyncio.Event)
    stats_delay: float = 0.0

    @property
    def info(self) -> FakeInfo:
        return FakeInfo(max_model_len=self.max_model_len)

    @property
    def reason(self) -> str:
        return "" if self.state == "ready" else f"the engine is {self.state}"

    async def submit(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> FakeStream:
        if self.state != "ready":
            raise Unavailable(f"engine is {self.state}", retry_after=2)
        if self.script.queue_full:
            raise QueueFull("1024 requests are waiting", retry_after=2.5)
        assert isinstance(prompt, list)
        assert request_id is not None
        self.seen.append((prompt, sampling, {"priority": priority, "cache_salt": cache_salt}))
        self.totals.prompt_tokens += len(prompt)
        return FakeStream(self, request_id, prompt, sampling)

    async def stats(self) -> EngineStats:
        await asyncio.sleep(self.stats_delay)
        self.totals.running = self.running
        return self.totals

    async def dead(self) -> str:
        await self.died.wait()
        return self.reason

    async def drain(self, timeout: float) -> None:
        self.state = "draining"
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self.die()

    def die(self) -> None:
        """Every stream raises Unavailable from now on."""
        self.state = "dead"
        self.died.set()


class FakeStream:
    """Deltas that echo the prompt's bytes, again and again."""

    def __init__(
        self, engine: FakeEngine, request_id: str, prompt: list[int], sampling: SamplingParams
    ) -> None:
        self.engine, self.request_id = engine, request_id
        self.prompt, self.sampling = prompt, sampling
        self.stopped = asyncio.Event()
        self.left = False
        self.outputs = self._run()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self.outputs

    async def cancel(self) -> None:
        self.engine.cancelled.append(self.request_id)
        self.stopped.set()

    async def _wait(self, seconds: float | None) -> None:
        if self.engine.died.is_set():
            raise Unavailable("the engine died")
        if seconds is not None:
            await asyncio.sleep(seconds)
            return
        died = asyncio.create_task(self.engine.died.wait())
        stopped = asyncio.create_task(self.stopped.wait())
        try:
            await asyncio.wait({died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            stopped.cancel()
        raise Unavailable("the engine died")

    async def _run(self) -> AsyncIterator[Output]:
        engine, script, arrival = self.engine, self.engine.script, time.monotonic()
        engine.running += 1
        try:
            await self._wait(script.first_delay)
            start = first = time.monotonic()
            limit = self.sampling.max_tokens or engine.max_model_len - len(self.prompt)
            for done in range(0, limit, script.delta):
                if script.fail_after is not None and done >= script.fail_after:
                    raise RequestFailed("logits were not finite")
                if script.end_early_after is not None and done >= script.end_early_after:
                    return
                if script.hang_after is not None and done >= script.hang_after:
                    await self._wait(None)
                if done:
                    await self._wait(script.token_delay)
                count = min(script.delta, limit - done)
                output = self._delta(done, count, done + count >= limit)
                if output.finished:
                    end = time.monotonic()
                    output.timing = Timing(arrival, start, first, end)
                    self._leave()
                yield output
                if output.finished:
                    return
        finally:
            self._leave()

    def _leave(self) -> None:
        self.engine.running -= not self.left
        self.left = True

    def _delta(self, done: int, count: int, last: bool) -> Output:
        body = [i for i in self.prompt if i < 256] or [63]
        completions = []
        for index in range(self.sampling.n):
            ids = [body[(done + k + index) % len(body)] for k in range(count)]
            text = self.engine.tokenizer.decode(ids) if self.engine.tokenizer else ""
            completion = Completion(index=index, text=text, token_ids=ids)
            for stop in self.sampling.stop:
                if stop in text:
                    completion.finish_reason, completion.stop_reason = FinishReason.STOP, stop
                    completion.text, last = text.partition(stop)[0], True
            if self.sampling.logprobs is not None:
                completion.logprobs = [position(i, self.sampling.logprobs) for i in ids]
            if last and completion.finish_reason is None:
                completion.finish_reason = FinishReason.LENGTH
            completions.append(completion)
        self.engine.totals.generation_tokens += count * self.sampling.n
        made = Output(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            completions=completions,
            finished=last,
            cached_tokens=self.engine.script.cached_tokens,
        )
        if done == 0 and self.sampling.prompt_logprobs is not None:
            k = self.sampling.prompt_logprobs
            made.prompt_logprobs = [None, *(position(i, k) for i in self.prompt[1:])]
        return made


def position(token_id: int, k: int) -> PositionLogprobs:
    """The chosen token at rank 1, then the ids after it; the last is impossible."""
    top = [
        TokenLogprob((token_id + r) % 128, -0.5 - r if r < 3 else float("-inf"), r + 1)
        for r in range(k)
    ]
    return PositionLogprobs(TokenLogprob(token_id, -0.5, 1), top)
