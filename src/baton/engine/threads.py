"""Threads that nobody waits for, one that stays, and interrupts that wait."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def in_daemon(work: Callable[[], T]) -> Future[T]:
    """`work()` in a daemon thread of its own: unlike a pool's, it holds up neither the end of an
    event loop nor that of the interpreter, however long it takes."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="baton-daemon", daemon=True).start()
    return future


def in_daemon_async(work: Callable[[], T]) -> asyncio.Future[T]:
    """`in_daemon` for the running event loop; cancelling it abandons the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    source = in_daemon(work)

    def copy() -> None:
        if future.cancelled():
            return
        error = source.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(source.result())

    def done(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(copy)

    source.add_done_callback(done)
    return future


class _Lasting(threading.Thread):
    """Does what it is given, one thing after the other, for as long as the process lives."""

    def __init__(self) -> None:
        super().__init__(name="baton-lasting", daemon=True)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            self._work.get()()

    def do(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(settle)
        return future.result()


_lasting: _Lasting | None = None


def in_lasting(work: Callable[[], T]) -> T:
    """Result of `work()` in a thread that does not end before the process does, unlike the
    caller's perhaps."""
    global _lasting
    thread = _lasting
    if thread is None or not thread.is_alive():  # the latter in a fork of this process
        thread = _lasting = _Lasting()
        thread.start()
    return thread.do(work)


class Interrupts:
    """Holds a Ctrl-C back while work is half done that must not be.

    Inside `with Interrupts() as interrupts:` it only shows when `interrupts.check()` is called,
    or at the end of the block. Elsewhere than in the main thread there is nothing to hold back. Of
    blocks inside one another the outermost holds, and every `check()` is its own.
    """

    def __init__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._around: Interrupts | None = None

    def check(self) -> None:
        """Handle an interrupt that has come, by raising KeyboardInterrupt as a rule."""
        if self._around is not None:
            return self._around.check()
        came, self._came = self._came, None
        if came is not None and callable(self._previous):
            self._previous(*came)

    def __enter__(self) -> Interrupts:
        self._previous = signal.getsignal(signal.SIGINT)
        self._held = threading.current_thread() is threading.main_thread() and callable(
            self._previous
        )
        around = getattr(self._previous, "__self__", None)
        if self._held and isinstance(around, Interrupts):
            self._around, self._held = around, False
        if self._held:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        if self._held:
            signal.signal(signal.SIGINT, self._previous)
            self.check()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)
