"""One engine core, driven by the calls of several threads.

Who waits for answers runs steps, one at a time, for everybody: a step's outputs go to whichever
call they belong to. So no call holds another one up, whatever its caller does between two steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from baton.core.errors import RequestError, RequestFailed, Unavailable
from baton.core.request import FinishReason, Output, TokenOutput
from baton.core.step import Scores
from baton.engine.core import EngineCore
from baton.engine.output import Answers, merge

_MOST_IN_FLIGHT = 1000  # steps: two, and a chunk's layers that come in steps of their own


class Call:
    """Prompts that a caller waits for, and what has come of them.

    scores: by request, of those that ask for them and have ended.
    """

    def __init__(self, prompts: list[Answers]) -> None:
        self.prompts = prompts
        self.scores: dict[str, list[Scores]] = {}
        self.error: Exception | None = None
        self.running: dict[str, int] = {}  # engine requests, and the prompt that each is of
        self._outputs: list[Output | None] = [None] * len(prompts)
        self._finished = self._told = 0

    def take(self, out: TokenOutput) -> list[str]:
        """Add an output; requests that the engine need not go on with."""
        index = self.running[out.request_id]
        answers = self.prompts[index]
        if out.finish_reason is FinishReason.ERROR:
            raise RequestFailed(out.error or "request failed")
        delta = answers.push(out)
        if delta is not None:
            self._outputs[index] = merge(self._outputs[index], delta, answers.sampling)
            self._finished += delta.finished
        aborts, answers.aborts = answers.aborts, []
        if out.finish_reason is not None or aborts:
            for ended in {*answers.children} - {*answers.unfinished}:
                self.running.pop(ended, None)
        return aborts

    def news(self) -> Iterator[int]:
        """How many prompts have finished, once for each that has since the last time."""
        while self._told < self._finished:
            self._told += 1
            yield self._told

    def outputs(self) -> list[Output]:
        """In the order of the prompts."""
        return [output for output in self._outputs if output is not None]


class SharedCore:
    """An EngineCore for several threads. Only one of them is in it at any time.

    Each call goes through `start`, then `step` until nothing of it runs, then `leave` in any case.

    on_step: hears every step's outputs.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.on_step: Callable[[Sequence[TokenOutput]], None] | None = None
        self._calls: dict[str, Call] = {}  # by their engine requests
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._ended = ""  # why nothing is answered any more
        self._mine = threading.local()  # whether this thread is in the core, or waits for it

    def start(self, call: Call, cache_salt: str = "", scores: Sequence[int] = ()) -> None:
        """Queue everything a call asks for.

        Args:
            scores: for each prompt, the position from which on to score it; empty: score none.

        Raises:
            RequestError: one of the requests is not acceptable; none has run.
            Unavailable: the core has ended.
        """
        with self._turn():
            self._require()
            for index, answers in enumerate(call.prompts):
                score = scores[index] if scores else -1
                requests = answers.requests(cache_salt=cache_salt, score=score)
                self._core.add(requests, limited=False)
                call.running |= dict.fromkeys(answers.children, index)
                self._calls |= dict.fromkeys(answers.children, call)

    def step(self, call: Call) -> None:
        """Run a step, unless all that the call waits for has come by now.

        Raises:
            RequestFailed: one of its requests failed.
            Unavailable: a rank died, a step broke, or the core has been closed.
        """
        with self._turn():
            if call.error is None and call.running:
                self._require()
                self._step()
            if call.error is not None:
                raise call.error

    def leave(self, call: Call) -> None:
        """Abort what still runs of a call. The last one commits the steps in flight."""
        with self._turn():
            for request_id in [name for name, owner in self._calls.items() if owner is call]:
                del self._calls[request_id]
                self._core.abort(request_id)  # unless it has ended
            if not self._calls:
                self._drain()
            self._forget()

    def close(self) -> None:
        """End the core between two steps, and with it the calls that run."""
        with self._turn():
            try:
                for request_id in self._calls:
                    self._core.abort(request_id)
                self._drain()
            finally:
                self._ended = self._ended or "this LLM has been closed"
                self._core.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The only one in the core. Who waits is next: the lock alone would as a rule go to the
        thread that has just given it up.

        Raises:
            RequestError: this thread is in the core, or waits for it: it would wait for itself.
        """
        if getattr(self._mine, "turn", False):
            raise RequestError(
                "an LLM cannot be called or closed in the middle of one of its own steps, by a "
                "signal handler or what `watched` calls: note it there, and do it afterwards"
            )
        self._mine.turn = True
        try:
            with self._next:
                self._lock.acquire()
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._mine.turn = False

    def _require(self) -> None:
        if self._ended:
            raise Unavailable(self._ended)

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except Exception as error:  # nobody knows whose outputs are lost
            if isinstance(error, Unavailable):
                self._ended = str(error)
            for call in self._calls.values():
                call.error = error
            return
        for out in outputs:
            owner = self._calls.get(out.request_id)
            if owner is not None and out.request_id in owner.running:
                self._hand(owner, out)
        self._forget()
        if self.on_step is not None:
            self.on_step(outputs)

    def _hand(self, call: Call, out: TokenOutput) -> None:
        """Give an output to the call that waits for it, in whichever thread."""
        try:
            aborts = call.take(out)
        except Exception as error:  # of this call alone
            call.error = error
            return
        for request_id in aborts:
            self._core.abort(request_id)
        if out.request_id not in call.running and out.request_id in self._core.scores:
            call.scores[out.request_id] = self._core.scores.pop(out.request_id)

    def _drain(self) -> None:
        """Commit what is in flight; nothing else runs. After a step that failed halfway that may be
        impossible: then this is the end of the core, for the next call to say."""
        try:
            for _ in range(_MOST_IN_FLIGHT):
                if self._ended or not self._core.has_work():
                    return
                self._core.step()
            self._ended = "what was in flight never came to an end"
        except Unavailable as error:
            self._ended = str(error)
        except Exception as error:
            self._ended = f"a step broke: {type(error).__name__}: {error}"

    def _forget(self) -> None:
        """Drop scores that no call waits for any more."""
        for request_id in self._core.scores.keys() - self._calls.keys():
            del self._core.scores[request_id]
