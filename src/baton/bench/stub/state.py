"""What all answers of a stub share: load, queue, prefill stage, prefix cache, what it did."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import msgspec
import numpy as np

from baton.bench.stub.answer import Answer, Request, clock
from baton.bench.stub.profile import Profile

#: characters of text that count as a token
CHARACTERS = 4.4
_ids = msgspec.json.Decoder(list[int])


class State:
    """A stub's memory."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.number = 0
        self._draw = random.Random(profile.seed)
        self._running: set[Answer] = set()
        self._waiting: deque[Answer] = deque()
        self._prefill_free = 0.0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._done: list[tuple[float, float, float, int, int, int]] = []
        self._most = 0
        self.last: dict[str, Any] = {}

    def prompt(self, request: Request) -> tuple[int, tuple[int, ...], int]:
        """Tokens of a prompt, names of its blocks, and how many tokens of it are cached."""
        raw = bytes(request.prompt)
        if not raw.startswith(b"["):
            said = request.messages or [{"content": msgspec.json.decode(raw or b'""')}]
            size = sum(len(str(message.get("content") or "")) for message in said)
            return max(1, round(size / CHARACTERS)), (), 0
        block = self.profile.block
        if not block:
            return raw.count(b",") + 1, (), 0
        ids = np.array(_ids.decode(raw), dtype=np.int64)
        chain, name = [], 0
        for start in range(0, len(ids) - block + 1, block):
            name = hash((name, ids[start : start + block].tobytes()))
            chain.append(name)
        return len(ids), tuple(chain), self._cached(chain, len(ids))

    def _cached(self, chain: list[int], tokens: int) -> int:
        found = 0
        while found < min(len(chain), (tokens - 1) // self.profile.block):
            if chain[found] not in self._cache:
                break
            found += 1
        return found * self.profile.block

    def submit(self, answer: Answer) -> None:
        """Begin an answer, or queue it."""
        self._waiting.append(answer)
        self._next()

    def _next(self) -> None:
        slots = self.profile.slots or len(self._running) + 1
        while self._waiting and len(self._running) < slots:
            answer = self._waiting.popleft()
            self._running.add(answer)
            self._most = max(self._most, len(self._running))
            answer.begin(clock())
            slots = self.profile.slots or len(self._running) + 1

    def first_token(self, answer: Answer, now: float) -> float:
        """When the first token of an answer that begins now is due."""
        new = answer.tokens - answer.cached
        if self.profile.prefill_rate:
            begin = max(now, self._prefill_free)
            now = self._prefill_free = begin + self._noisy(new / self.profile.prefill_rate)
        load = len(self._running) + len(self._waiting)
        return now + self._noisy(self.profile.ttft.at(new, load))

    def gap(self, answer: Answer) -> float:
        """Seconds from a token to the next."""
        return self._noisy(self.profile.itl.at(answer.context, len(self._running)))

    def _noisy(self, seconds: float) -> float:
        sigma = self.profile.noise
        return seconds * self._draw.lognormvariate(-sigma * sigma / 2, sigma) if sigma else seconds

    def prefilled(self, answer: Answer) -> None:
        """Its prompt is in the cache now."""
        for block in reversed(answer.chain):  # the first block is the last to be evicted
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self.profile.cache_blocks:
            self._cache.popitem(last=False)

    def ended(self, answer: Answer) -> None:
        """It is over, or its client has gone: its slot is free."""
        answer.cancel()
        if answer in self._waiting:
            self._waiting.remove(answer)
        if answer not in self._running:
            return
        self._running.discard(answer)
        if answer.wrote:
            times = (answer.arrived, answer.wrote[0], answer.wrote[-1])
            self._done.append((*times, answer.tokens, len(answer.wrote), answer.cached))
        self._next()

    def reset_cache(self) -> None:
        """Forget every block."""
        self._cache.clear()

    def stats(self) -> dict[str, Any]:
        """What was done: for each answer when its request began to arrive, when its first and last
        event were written (monotonic clock), prompt tokens, events, cached tokens."""
        return {
            "requests": self.number,
            "most_running": self._most,
            "last": self.last,
            "answers": self._done,
        }

    def event_head(self, chat: bool) -> tuple[bytes, bytes]:
        """A stream event before its text, and between text and finish reason."""
        model = self.profile.model.encode()
        if chat:
            kind, text, after = b"chat.completion.chunk", b'"delta":{"content":"', b'"}'
        else:
            kind, text, after = b"text_completion", b'"text":"', b'"'
        head = b'data: {"id":"stub","object":"%b","model":"%b","choices":[{"index":0,%b'
        return head % (kind, model, text), after + b',"finish_reason":'
