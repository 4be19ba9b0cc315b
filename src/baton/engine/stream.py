"""One prompt's answers as they come from the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from baton.core.errors import BatonError
from baton.core.request import Output
from baton.engine.output import Answers, join

if TYPE_CHECKING:
    from baton.engine.async_engine import AsyncEngine


class Stream:
    """Deltas of one prompt's answers, as an async iterator. The last one has `finished` set; a
    stream that fails or is cancelled ends without it.

    What has come since its reader last looked is one delta: a reader that falls behind the engine
    gets fewer, longer pieces instead of falling behind further.

    Raises, while iterating, once what came before has been read: RequestFailed (the engine failed
    this request, or said something of it that could not be made text), Unavailable (the engine
    process died, or the engine was stopped).
    """

    def __init__(self, engine: AsyncEngine, answers: Answers) -> None:
        self._engine = engine
        self.answers = answers
        self.request_id = answers.request_id
        self.prompt_token_ids = answers.prompt
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._delta: Output | None = None
        self._error: BatonError | None = None
        self._news = asyncio.Event()
        self._ended = False

    def put(self, item: Output | BatonError) -> None:
        """Hand over a delta, or the error that ends the stream."""
        if isinstance(item, BatonError):
            self._error = item
        else:
            self._delta = item if self._delta is None else join(self._delta, item)
        self._news.set()

    def fail(self, error: BatonError) -> None:
        """End the stream with an error, whether it has been accepted yet or not."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        else:
            self.put(error)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while self._delta is None and self._error is None and not self._ended:
            self._news.clear()
            await self._news.wait()  # of several readers, another may have taken it meanwhile
        if self._ended:
            raise StopAsyncIteration
        delta, self._delta = self._delta, None
        if delta is not None and not delta.finished:
            return delta
        self._end()
        if delta is None:
            assert self._error is not None, "there is news"
            raise self._error
        return delta

    async def cancel(self) -> None:
        """Abort what still runs; harmless when everything has ended."""
        self._end()
        self._engine.forget(self)

    def _end(self) -> None:
        """Let whoever waits for more know that there is none."""
        self._ended = True
        self._news.set()
