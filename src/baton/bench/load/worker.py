"""One process that sends: it gets its share of the requests, and tells what came of each.

Open loop: a unit (one request, or a session's turns) begins at its time whatever the server does.
Closed loop: as many units at once as there are slots. Everything is timed from when a request
should have been sent, so a slow server cannot hide behind a client that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import msgspec

from baton.bench.load.answer import Reader
from baton.bench.load.http import Connection, Pool, Silent, clock
from baton.bench.load.lag import tick
from baton.bench.load.target import Target
from baton.bench.loop import loop_factory
from baton.bench.record import Record
from baton.bench.sse import ServerError, headers
from baton.bench.workload.job import Job, Phase
from baton.bench.workload.prompts import PromptMaker

#: bytes of bodies made ahead of their time
AHEAD = 32 * 2**20
#: seconds within which the news that a connection was closed before comes back
RACE = 1.0
#: seconds between messages to the parent
REPORT = 0.1


@dataclass(frozen=True)
class Unit:
    """Requests that follow one another, with their indices in the workload. `at` is when the first
    is due in seconds from the start; None in a closed loop."""

    jobs: tuple[tuple[int, Job], ...]
    at: float | None = None


@dataclass(frozen=True)
class Share:
    """What one worker does. `slots` caps its requests in flight; None does not."""

    target: Target
    model: str
    units: Sequence[Unit]
    slots: int | None
    phase: Phase = "measure"


@dataclass(frozen=True)
class Finished:
    """A worker's last message: seconds of lag of its event loop, and of its sends."""

    ticks: list[float]
    sends: list[float]


def main(pipe: Pipe) -> None:
    """Run shares until the parent sends None: `Share`, "ready" back, the start time, then JSON
    lines of records and counts of requests in flight back, and `Finished`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    _raise_file_limit()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # a collection is a pause that the figures would show
    gone = contextlib.suppress(EOFError, ConnectionError)  # of the parent: nobody is told
    with asyncio.Runner(loop_factory=loop_factory()) as runner, gone:
        while (share := pipe.recv()) is not None:
            sender = Sender(share)
            runner.run(sender.prepare())
            pipe.send("ready")
            start = pipe.recv()
            pipe.send(runner.run(sender.run(start, pipe)))


def _raise_file_limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Sender:
    """Sends one share."""

    def __init__(self, share: Share) -> None:
        self._share, self._target = share, share.target
        self._prompts: PromptMaker = share.target.prompt_maker()
        self._pool = Pool(share.target.base_url, headers(share.target.api_key))
        self._fields = share.target.fields(share.model)
        self._path = share.target.path
        self._in_flight: dict[Connection, float] = {}
        self._lines: list[bytes] = []
        self._ticks: list[float] = []
        self._sends: list[float] = []
        self._start = 0.0

    async def prepare(self) -> None:
        """Connect the slots of a closed loop, which all begin at once."""
        if not self._is_open():
            await self._pool.open(min(self._share.slots or 1, len(self._share.units)))

    async def run(self, start: float, pipe: Pipe) -> Finished:
        """Send everything from `start` on the monotonic clock; records go through `pipe`. A message
        from the parent ends it early."""
        self._start = start
        helpers = [asyncio.ensure_future(x) for x in (tick(self._ticks), self._watch())]
        work = asyncio.ensure_future(self._open() if self._is_open() else self._closed())
        try:
            while not work.done():
                await asyncio.wait([work], timeout=REPORT)
                self._report(pipe)
                if pipe.poll():
                    pipe.recv()
                    work.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await work
            if not work.cancelled():
                work.result()
        finally:
            for helper in helpers:
                helper.cancel()
            self._pool.close()
        self._report(pipe)
        return Finished(self._ticks, self._sends)

    def _report(self, pipe: Pipe) -> None:
        pipe.send(len(self._in_flight))
        if self._lines:
            pipe.send(b"".join(self._lines))
            self._lines = []

    def _is_open(self) -> bool:
        return any(unit.at is not None for unit in self._share.units)

    def _now(self) -> float:
        return clock() - self._start

    async def _until(self, at: float) -> None:
        """Sleep until then and not less: timers of event loops are rounded to milliseconds."""
        while (left := at - self._now()) > 0:
            await asyncio.sleep(left)

    async def _open(self) -> None:
        """Begin each unit at its time, with bodies made ahead as far as they fit."""
        free = asyncio.Semaphore(self._share.slots or sys.maxsize)
        left: Iterator[Unit] = iter(self._share.units)
        made: deque[tuple[Unit, bytes]] = deque()
        size, unit = 0, None
        async with asyncio.TaskGroup() as group:
            while True:
                if made and (made[0][0].at or 0.0) <= self._now():
                    unit, body = made.popleft()
                    size -= len(body)
                    group.create_task(self._unit(unit, body, unit.at or 0.0, free))
                elif size < AHEAD and (unit := next(left, None)) is not None:
                    made.append((unit, self._body(unit.jobs[0][1])))
                    size += len(made[-1][1])
                elif made:
                    await self._until(made[0][0].at or 0.0)
                else:
                    return
                await asyncio.sleep(0)  # the new task begins, answers are read between bodies

    async def _closed(self) -> None:
        """As many units at once as there are slots."""
        left = iter(self._share.units)
        free = asyncio.Semaphore(sys.maxsize)
        await self._until(0.0)

        async def slot() -> None:
            for unit in left:
                await self._unit(unit, self._body(unit.jobs[0][1]), self._now(), free)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._share.slots or 1, len(self._share.units))):
                group.create_task(slot())

    async def _unit(self, unit: Unit, body: bytes, at: float, free: asyncio.Semaphore) -> None:
        for place, (index, job) in enumerate(unit.jobs):
            if place:
                at = self._now() + job.think
                body = self._body(job)
                await self._until(at)
            await self._send(index, job, body, at, free)

    def _body(self, job: Job) -> bytes:
        """The request's body but for its fields that are the same for all."""
        key = b"messages" if self._path == "/chat/completions" else b"prompt"
        return b'{"%b":%b,"max_tokens":%d,%b' % (
            key,
            self._prompts.json(job.segments),
            job.max_tokens,
            self._fields,
        )

    async def _send(
        self, index: int, job: Job, body: bytes, at: float, free: asyncio.Semaphore
    ) -> None:
        record = Record(
            index=index,
            scheduled=at,
            sent=at,
            input_tokens=job.length,
            asked_output=job.max_tokens,
            shared_tokens=job.shared,
            group=job.group,
            session=job.session,
            turn=job.turn,
            phase=self._share.phase,
        )
        try:
            waiting = free.locked()
            async with free:
                ready = self._now() if waiting else at
                await self._exchange(record, body, ready)
        except Silent as error:
            record.status, record.error = "timeout", str(error)
        except ServerError as error:
            record.status, record.error = "error", str(error)
        except asyncio.CancelledError:
            record.status, record.error = "cancelled", "the run was stopped"
            raise
        finally:
            record.end = self._now()
            self._keep(record)

    async def _exchange(self, record: Record, body: bytes, ready: float) -> None:
        head = self._pool.head(self._path, len(body))
        self._sends.append(self._now() - ready)
        connection, used = await self._pool.take()
        record.sent = self._now()
        while True:
            reader, begun = Reader(record, self._start), clock()
            try:
                await self._ask(connection, head, body, reader)
                break
            except ServerError as error:
                # a server may close an idle connection just when it is used again; one that closes
                # later was at work on the request
                late = clock() - begun > RACE
                if not used or late or connection.answered or isinstance(error, Silent):
                    raise
            connection, used = await self._pool.take(fresh=True)
        reader.finish()

    async def _ask(self, connection: Connection, head: bytes, body: bytes, reader: Reader) -> None:
        """One request on one connection, which is watched meanwhile and given back after."""
        self._in_flight[connection] = clock()
        try:
            await connection.request(head, body, reader)
        finally:
            del self._in_flight[connection]
            self._pool.give(connection)

    async def _watch(self) -> None:
        """End requests that are silent, or go on, for too long."""
        silence, limit = self._target.timeout, self._target.limit
        while True:
            await asyncio.sleep(max(0.02, min(0.5, silence / 20)))
            now = clock()
            for connection, begun in list(self._in_flight.items()):
                if now - connection.silence > silence:
                    connection.fail(Silent(f"no byte within {silence:g} s"))
                elif now - begun > limit:
                    connection.fail(Silent(f"not over within {limit:g} s"))

    def _keep(self, record: Record) -> None:
        for name in ("scheduled", "sent", "end"):
            setattr(record, name, round(getattr(record, name), 6))
        record.arrivals = [round(at, 6) for at in record.arrivals]
        self._lines.append(msgspec.json.encode(record) + b"\n")
