"""Which requests are accepted: what can never run is refused by name, what is too much by 429."""

from __future__ import annotations

import struct
from array import array

import numpy as np

from baton.config.engine import EngineConfig
from baton.core.errors import QueueFull, RequestError
from baton.core.request import Request
from baton.kv.manager import KVManager
from baton.scheduler.queue import Queue

#: Bounds of `retry_after`, seconds.
SHORTEST_RETRY, LONGEST_RETRY = 1.0, 60.0
#: The throughput estimate keeps this share of itself per step.
THROUGHPUT_MEMORY = 0.95


class Admission:
    """Checks a request against the model, the pool and the queue's limits."""

    def __init__(self, config: EngineConfig, kv: KVManager, queue: Queue) -> None:
        self._config, self._kv, self._queue = config, kv, queue
        self._tokens = self._seconds = 0.0

    def limit(self, request: Request) -> int:
        """Most tokens the request may grow to, prompt included.

        `max_tokens` None means: to `max_model_len`, or as far as the whole pool reaches.

        Raises:
            RequestError: the request could not run even alone; the message names the numbers.
        """
        prompt, longest = len(request.prompt), self._config.max_model_len
        if prompt == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if prompt > longest - 1:
            raise RequestError(
                f"the prompt has {prompt} tokens, but with max_model_len={longest} it may have "
                f"at most {longest - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        # The last token is returned but never computed, hence one more than the pages hold.
        room = self._kv.num_pages * self._kv.page_size + 1
        wanted = 1 if request.score >= 0 else request.sampling.max_tokens
        limit = longest if wanted is None else min(prompt + wanted, longest)
        if prompt + 1 > room or (wanted is not None and limit > room):
            raise RequestError(
                f"{prompt} prompt tokens and up to {limit - prompt} output tokens need "
                f"{self._kv.pages_for(limit - 1)} KV pages, but the pool has "
                f"{self._kv.num_pages} pages of {self._kv.page_size} tokens",
                param="prompt" if prompt + 1 > room else "max_tokens",
            )
        return min(limit, room)

    def ids(self, request: Request) -> array[int]:
        """The token ids of a prompt that is not empty, int64.

        Raises:
            RequestError: one of them is outside the vocabulary; names it.
        """
        vocab = self._config.model.vocab_size
        try:
            # Twice as fast as an array of the list.
            ids = array("q", struct.pack(f"{len(request.prompt)}q", *request.prompt))
            if np.frombuffer(ids, np.uint64).max() < vocab:  # which makes negative ones large
                return ids
        except struct.error:
            pass  # larger than any int64
        wrong = next(token for token in request.prompt if not 0 <= token < vocab)
        raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab}", param="prompt")

    def make_room(self, uncached: int, answers: int = 1) -> None:
        """Whether a prompt with `uncached` tokens may wait for so many answers, each of which is a
        request. A prompt that is the only one waiting is never refused for its length.

        Raises:
            RequestError: they are more than may ever wait.
            QueueFull: there is no room for them now.
        """
        waiting, tokens = len(self._queue), self._queue.tokens
        most, most_tokens = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        if answers > most:
            raise RequestError(
                f"n={answers} answers can never be queued: at most {most} requests may wait",
                param="n",
            )
        if waiting + answers > most:
            problem = f"{waiting} requests are waiting, at most {most} may"
        elif waiting and tokens + uncached > most_tokens:
            problem = (
                f"{tokens} uncached prompt tokens are waiting; {uncached} more would exceed "
                f"{most_tokens}"
            )
        else:
            return
        raise QueueFull(problem, retry_after=self._retry_after())

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn the throughput from a step that computed `tokens` in `seconds`."""
        self._tokens = self._tokens * THROUGHPUT_MEMORY + tokens
        self._seconds = self._seconds * THROUGHPUT_MEMORY + seconds

    def _retry_after(self) -> float:
        """Seconds until about half of the queue has been computed."""
        if self._tokens <= 0.0:
            return SHORTEST_RETRY
        seconds = self._queue.tokens / 2 * self._seconds / self._tokens
        return min(LONGEST_RETRY, max(SHORTEST_RETRY, seconds))
