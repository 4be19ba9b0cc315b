"""The engine as the server sees it: an engine process under supervision, streams of text out.

    starting --ready--> ready --process died--> restarting --ready--> ready
                          |                          '--too often, or a hopeless error--> dead
                          '--drain()--> draining --stop()--> dead

A process that dies fails every open stream with Unavailable at once and is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from baton.config.fingerprint import Fingerprint
from baton.config.options import EngineOptions
from baton.core.errors import (
    BatonError,
    QueueFull,
    RequestError,
    RequestFailed,
    Unavailable,
)
from baton.core.log import get_logger
from baton.core.request import FinishReason, Output
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats
from baton.engine.build import find_source, tokenizer_of
from baton.engine.child import EngineChild, launch
from baton.engine.messages import (
    Abort,
    Accepted,
    Add,
    AskStats,
    EngineInfo,
    Fatal,
    FromEngine,
    Outputs,
    Rejected,
    StatsReply,
)
from baton.engine.output import Answers, fan_out
from baton.engine.threads import in_daemon_async
from baton.models.tokenizer import Tokenizer

log = get_logger("api")

State = Literal["starting", "ready", "restarting", "draining", "dead"]

#: Restarts allowed within RESTART_WINDOW seconds before the engine is given up.
MAX_RESTARTS = 3
RESTART_WINDOW = 600.0


class Stream:
    """Deltas of one prompt's answers, as an async iterator; the last one has `finished` set.

    Raises, while iterating: RequestFailed (this request), Unavailable (the engine process died).
    """

    def __init__(self, engine: AsyncEngine, answers: Answers) -> None:
        self._engine = engine
        self.answers = answers
        self.request_id = answers.request_id
        self.prompt_token_ids = answers.prompt
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: asyncio.Queue[Output | BatonError] = asyncio.Queue()
        self._ended = False

    def put(self, item: Output | BatonError) -> None:
        """Hand over a delta, or the error that ends the stream."""
        self._queue.put_nowait(item)

    def fail(self, error: BatonError) -> None:
        """End the stream with an error, whether it has been accepted yet or not."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        else:
            self.put(error)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, BatonError):
            self._ended = True
            raise item
        self._ended = item.finished
        return item

    async def cancel(self) -> None:
        """Abort what still runs; harmless when everything has ended."""
        self._ended = True
        await self._engine.forget(self)


class AsyncEngine:
    """Submit prompts, read streams; the engine runs in its own process.

    Use `await AsyncEngine.start(EngineOptions.of(model, ...))`.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.state: State = "starting"
        self.tokenizer: Tokenizer | None = None
        self.info: EngineInfo
        self._child: EngineChild
        self._streams: dict[str, Stream] = {}
        self._stats: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count()
        self._restarts: list[float] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._reason = "the engine is starting"

    @classmethod
    async def start(cls, options: EngineOptions) -> AsyncEngine:
        """Spawn the engine process and wait until it is ready.

        Raises:
            ConfigError, ModelError, FingerprintMismatch: as found by the engine process.
        """
        engine = cls(options)
        source = await in_daemon_async(lambda: find_source(options))
        tokenizer = in_daemon_async(lambda: tokenizer_of(options, source))
        try:
            engine._child, engine.info = await launch(options)
        except BaseException:
            tokenizer.cancel()
            raise
        try:
            engine.tokenizer = await tokenizer
        except BaseException:
            engine._child.kill()
            raise
        engine.state = "ready"
        engine._supervisor = asyncio.create_task(engine._supervise())
        return engine

    @property
    def fingerprint(self) -> Fingerprint:
        """What is being served: engine, model, weights, tokenizer, layout."""
        return Fingerprint.from_dict(self.info.fingerprint)

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._child.pid

    @property
    def reason(self) -> str:
        """Why the engine does not take requests, for people; empty when it does."""
        return "" if self.state == "ready" else self._reason

    async def submit(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Stream:
        """Queue a prompt; returns once the engine has accepted it.

        Raises:
            RequestError: the prompt or an option is not acceptable.
            QueueFull: the waiting queue is at its limit.
            Unavailable: the engine is restarting, draining or dead.
        """
        self._require_ready()
        sampling.verify(self.info.vocab_size)
        ids = await self._encode(prompt)
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", param="stop")
        self._require_ready()
        name = request_id or uuid.uuid4().hex
        answers = Answers(name, ids, sampling, self.tokenizer)
        stream = Stream(self, answers)
        clash = [child for child in answers.children if child in self._streams]
        if clash:
            raise RequestError(f"request id {name!r} is already in use", param="request_id")
        self._streams |= dict.fromkeys(answers.children, stream)
        requests = fan_out(
            name,
            ids,
            sampling,
            priority=priority,
            cache_salt=cache_salt,
            arrival=time.monotonic(),
        )
        try:
            await self._child.send(Add(requests))
            await stream.accepted
        except asyncio.CancelledError:
            await self.forget(stream)
            raise
        except BatonError:
            self._drop(stream)
            raise
        return stream

    async def generate(
        self, prompt: str | list[int], sampling: SamplingParams, **kw: Any
    ) -> AsyncIterator[Output]:
        """`submit()` and iterate; leaving the loop early aborts the request."""
        stream = await self.submit(prompt, sampling, **kw)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.cancel()

    async def stats(self) -> EngineStats:
        """Counters of the engine process."""
        if self.state not in ("ready", "draining"):
            raise Unavailable(self._reason)
        number = next(self._numbers)
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats[number] = future
        try:
            await self._child.send(AskStats(number))
            return await asyncio.wait_for(future, 10.0)
        except TimeoutError:
            raise Unavailable("the engine process did not answer within 10 s") from None
        finally:
            self._stats.pop(number, None)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait up to `timeout` seconds for the running ones."""
        if self.state == "ready":
            self.state, self._reason = "draining", "the server is shutting down"
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the engine process; open streams get Unavailable."""
        self.state, self._reason = "dead", "the engine has stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail_all(Unavailable(self._reason))
        await self._child.stop()

    async def forget(self, stream: Stream) -> None:
        """Stop caring about a stream and abort what still runs of it."""
        running = [c for c in stream.answers.unfinished if c in self._streams]
        self._drop(stream)
        if running and self.state in ("ready", "draining"):
            await self._child.send(Abort(running))

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(self._reason, retry_after=5.0)

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("text prompts need a tokenizer", param="prompt")
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        else:
            ids = prompt
        limit = self.info.max_model_len
        if len(ids) >= limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; this model takes at most {limit - 1} "
                f"and needs room for one more (max_model_len {limit})",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids

    def _drop(self, stream: Stream) -> None:
        for child in stream.answers.children:
            self._streams.pop(child, None)

    def _fail_all(self, error: BatonError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        for future in self._stats.values():
            if not future.done():
                future.set_exception(error)

    async def _supervise(self) -> None:
        """Read the engine's messages until it dies; then start it again, or give up."""
        while self.state != "dead":
            fatal = await self._read_until_death()
            died = f"the engine process died ({fatal or self._child.how_it_ended()})"
            self._child.kill()
            while self._note_death(died):
                try:
                    self._child, self.info = await launch(self.options)
                except (Unavailable, OSError) as error:  # it may go better next time
                    died = str(error)
                except Exception as error:
                    self.state, self._reason = "dead", f"{died}; it does not start again: {error}"
                    log.error("%s", self._reason)
                    return
                else:
                    self.state = "ready"
                    log.info("the engine process is back")
                    break

    def _note_death(self, died: str) -> bool:
        """Fail what is open; True if the engine is to be started again."""
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW] + [now]
        hopeless = len(self._restarts) > MAX_RESTARTS
        again = "" if hopeless else "; it is being restarted, try again shortly"
        self.state = "dead" if hopeless else "restarting"
        self._reason = died + again
        log.error("%s", self._reason)
        self._fail_all(Unavailable(self._reason, retry_after=10.0))
        if hopeless:
            log.error("giving up after %d restarts; restart the server", MAX_RESTARTS)
        return not hopeless

    async def _read_until_death(self) -> str | None:
        while True:
            try:
                message = await self._child.receive()
            except msgspec.MsgspecError as error:  # a message that we cannot read: start afresh
                return f"it sent what is no message: {error}"
            if message is None or isinstance(message, Fatal):
                return message.message if message is not None else None
            try:
                self._dispatch(message)
            except Exception:  # one bad output must not silence all other streams
                log.exception("could not handle %s", type(message).__name__)
            if isinstance(message, Outputs):
                await self._abort_stopped(message)

    def _dispatch(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for out in message.outputs:
                stream = self._streams.get(out.request_id)
                if stream is None:
                    continue
                if out.finish_reason is FinishReason.ERROR:
                    stream.put(RequestFailed(out.error or "the request failed"))
                    continue
                delta = stream.answers.push(out)
                if delta is not None:
                    stream.put(delta)
        elif isinstance(message, Accepted | Rejected):
            self._answer(message)
        elif isinstance(message, StatsReply):
            future = self._stats.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.stats)

    def _answer(self, message: Accepted | Rejected) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None or stream.accepted.done():
            return
        if isinstance(message, Accepted):
            stream.accepted.set_result(None)
        elif message.kind == "full":
            stream.fail(QueueFull(message.message, retry_after=message.retry_after))
        else:
            stream.fail(RequestError(message.message, param=message.param, code=message.code))

    async def _abort_stopped(self, message: Outputs) -> None:
        """Forget ended answers; abort those that ended here, on a stop string or an error."""
        aborts: list[str] = []
        for out in message.outputs:
            stream = self._streams.get(out.request_id)
            if stream is None:
                continue
            if out.finish_reason is FinishReason.ERROR:
                aborts += [c for c in stream.answers.unfinished if c != out.request_id]
                self._drop(stream)
                continue
            aborts += stream.answers.aborts
            stream.answers.aborts.clear()
            if out.request_id not in stream.answers.unfinished:
                self._streams.pop(out.request_id, None)
        if aborts:
            await self._child.send(Abort(aborts))
