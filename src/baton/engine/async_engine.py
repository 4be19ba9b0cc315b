"""The engine as the server sees it: an engine process under supervision, streams of text out.

    starting --ready--> ready --process died--> restarting --ready--> ready
                          |                          '--too often, or a hopeless error--> dead
                          '--drain()--> draining --stop()--> dead

A process that dies fails every open stream with Unavailable at once and is started again. One that
gives no sign of life (see `Pulse`) is `unresponsive` until it gives one: it takes no requests, and
open streams wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

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
from baton.core.request import FinishReason, Output, TokenOutput
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats
from baton.engine.calls import Prompt, token_ids
from baton.engine.child import EngineChild
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
from baton.engine.output import Answers
from baton.engine.pulse import INTERVAL, Pulse
from baton.engine.source import find_source, tokenizer_of
from baton.engine.stream import Stream
from baton.engine.threads import in_daemon_async
from baton.models.tokenizer import Tokenizer

log = get_logger("api")

State = Literal["starting", "ready", "unresponsive", "restarting", "draining", "dead"]
#: states in which there is a process that listens
_LISTENING: set[State] = {"ready", "unresponsive", "draining"}

#: Restarts allowed within RESTART_WINDOW seconds before the engine is given up.
MAX_RESTARTS = 3
RESTART_WINDOW = 600.0

#: Number of a question for stats whose answer is for the watcher only.
PULSE = -1

#: Messages of the engine, each a step's outputs, that are delivered before streams go on.
AT_ONCE = 8


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
        self._streams: dict[str, Stream] = {}  # by the engine's names; `_named` by the callers'
        self._named: dict[str, Stream] = {}
        self._stats: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count()
        self._restarts: list[float] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._pulse = Pulse()
        self._reason = "the engine is starting"

    @classmethod
    async def start(cls, options: EngineOptions) -> AsyncEngine:
        """Spawn the engine process and wait until it is ready.

        Raises:
            ConfigError, ModelError, FingerprintMismatch: as found by the engine process.
        """
        engine = cls(options)
        source = await in_daemon_async(lambda: find_source(options))
        engine._child = EngineChild(options)
        try:
            engine.info, engine.tokenizer = await asyncio.gather(
                engine._child.ready(), in_daemon_async(lambda: tokenizer_of(options, source))
            )
        except BaseException:
            await engine._child.stop()
            raise
        engine.state, engine._pulse = "ready", Pulse(engine.info.longest_step)
        engine._supervisor = asyncio.create_task(engine._supervise())
        engine._watcher = asyncio.create_task(engine._watch())
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
        prompt: Prompt,
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
        if not isinstance(prompt, str):
            prompt = token_ids(prompt, "prompt", "text or a list of token ids")
        name = request_id or uuid.uuid4().hex
        context = self.tokenizer, self.info.vocab_size, f"{name}/{next(self._numbers)}"
        make = functools.partial(Answers.of, name, prompt, sampling, *context)
        answers = await asyncio.to_thread(make) if isinstance(prompt, str) else make()
        self._require_ready()
        if name in self._named:
            raise RequestError(f"request id {name!r} is already in use", param="request_id")
        stream = self._named[name] = Stream(self, answers)
        self._streams |= dict.fromkeys(answers.children, stream)
        try:
            self._child.send(Add(answers.requests(priority=priority, cache_salt=cache_salt)))
            await stream.accepted
        except asyncio.CancelledError:
            self.forget(stream)
            raise
        except Exception as error:
            self._drop(stream)
            if isinstance(error, TypeError | ValueError | OverflowError):  # it cannot be encoded
                raise RequestError(f"the request cannot be sent: {error}") from None
            raise
        return stream

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, **kw: Any
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
            self._child.send(AskStats(number))
            return await asyncio.wait_for(future, 10.0)
        except TimeoutError:
            raise Unavailable("the engine process did not answer within 10 s") from None
        finally:
            self._stats.pop(number, None)

    async def dead(self) -> str:
        """Wait until the engine has died and is not started again; returns why."""
        assert self._supervisor is not None, "it has started"
        await asyncio.wait({self._supervisor})
        return self._reason

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait up to `timeout` seconds for the running ones."""
        if self.state in ("ready", "unresponsive", "restarting"):
            self.state, self._reason = "draining", "the server is shutting down"
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the engine process; open streams get Unavailable."""
        self.state, self._reason = "dead", "the engine has stopped"
        for task in (self._watcher, self._supervisor):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        self._fail_all(Unavailable(self._reason))
        await self._child.stop()

    def forget(self, stream: Stream) -> None:
        """Stop caring about a stream and abort what still runs of it."""
        running = [c for c in stream.answers.unfinished if c in self._streams]
        self._drop(stream)
        if running and self.state in _LISTENING:
            self._child.send(Abort(running))

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(self._reason, retry_after=5.0)

    def _drop(self, stream: Stream) -> None:
        for child in stream.answers.children:
            self._streams.pop(child, None)
        if self._named.get(stream.request_id) is stream:
            del self._named[stream.request_id]

    def _fail_all(self, error: BatonError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        self._named.clear()
        for future in self._stats.values():
            if not future.done():
                future.set_exception(error)

    def _refuse(self, state: State, reason: str) -> None:
        """Take no more requests, and fail what is open."""
        self.state, self._reason = state, reason
        log.error("%s", reason)
        self._fail_all(Unavailable(reason, retry_after=10.0))

    async def _watch(self) -> None:
        """Look at the engine's pulse, for ever: a look that fails says nothing about the engine,
        so it is logged, and the next one comes later."""
        while True:
            await asyncio.sleep(min(INTERVAL, self._pulse.patience) / 10)
            try:
                self._look()
            except Exception:
                log.exception("could not see whether the engine answers; trying again")
                await asyncio.sleep(INTERVAL)

    def _look(self) -> None:
        """Ask the engine for a sign of life now and then, and say when it gives none."""
        if self.state in _LISTENING and self._pulse.due:
            self._child.send(AskStats(PULSE))
            self._pulse.asked()
        if self.state == "ready" and self._pulse.lost:
            self._reason = f"no sign of life from the engine for {self._pulse.patience:.0f} s"
            self.state = "unresponsive"
            log.error("%s", self._reason)

    def _heard(self) -> None:
        self._pulse.heard()
        if self.state == "unresponsive":
            self.state = "ready"
            log.info("the engine answers again")

    async def _supervise(self) -> None:
        """Deliver what the engine says until it dies; then start it again, or give up."""
        try:
            while True:
                await self._restart(await self._deliver_until_death())
        except Unavailable as error:
            reason = str(error)
        except Exception as error:
            log.exception("the engine's supervisor failed")
            reason = f"internal error: {type(error).__name__}: {error}"
        self._refuse("dead", reason)
        await self._child.stop()

    async def _restart(self, died: str) -> None:
        """Start a new engine process, which must be the same engine as the one before.

        Raises:
            Unavailable: it died too often, will never start again, or was to end anyway.
        """
        same = dataclasses.replace(
            self.options, expect_fingerprint=json.dumps(self.info.fingerprint)
        )
        while True:
            now = time.monotonic()
            self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW] + [now]
            if self.state == "draining":
                raise Unavailable(f"{died} while the server was shutting down")
            if len(self._restarts) > MAX_RESTARTS:
                often = f"{MAX_RESTARTS} times in {RESTART_WINDOW / 60:.0f} minutes"
                raise Unavailable(f"{died}, and has been started again {often} already")
            self._refuse("restarting", f"{died}; it is being restarted, try again shortly")
            await self._child.stop()
            try:
                self._child = EngineChild(same)
                self.info = await self._child.ready()
                self._pulse = Pulse(self.info.longest_step)
                break
            except (Unavailable, OSError) as error:  # it may go better next time
                died = str(error)
            except BatonError as error:
                raise Unavailable(f"{died}; it does not start again: {error}") from None
        if self.state == "restarting":  # and not draining by now
            self.state = "ready"
        log.info("the engine process is back")

    async def _deliver_until_death(self) -> str:
        """Returns how the engine process died, for people."""
        while True:
            # More than one before any stream goes on: see `Stream`.
            messages = await self._child.receive(AT_ONCE)
            if not messages:
                return f"the engine process died ({self._child.how_it_ended()})"
            self._heard()
            for message in messages:
                if isinstance(message, Fatal):
                    return f"the engine process died ({message.message})"
                self._take(message)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            aborts = [child for out in message.outputs for child in self._deliver(out)]
            if aborts:
                self._child.send(Abort(aborts))
        elif isinstance(message, Accepted | Rejected):
            self._answer(message)
        elif isinstance(message, StatsReply):
            self._pulse.longest_step = message.stats.longest_step
            future = self._stats.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.stats)

    def _deliver(self, out: TokenOutput) -> list[str]:
        """Pass one output on to its stream; engine requests that are to be aborted now: those that
        ended here, on a stop string, or what is left of a stream that failed."""
        stream = self._streams.get(out.request_id)
        if stream is None:
            return []
        try:
            if out.finish_reason is FinishReason.ERROR:
                raise RequestFailed(out.error or "the request failed")
            delta = stream.answers.push(out)
        except Exception as error:  # one bad output must not silence other streams
            if not isinstance(error, RequestFailed):
                log.exception("could not handle an output of %s", out.request_id)
                error = RequestFailed(f"{type(error).__name__}: {error}")
            self._drop(stream)
            stream.put(error)
            return stream.answers.unfinished
        if delta is not None:
            stream.put(delta)
        if not stream.answers.unfinished:
            self._drop(stream)
        aborts, stream.answers.aborts = stream.answers.aborts, []
        return aborts

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
