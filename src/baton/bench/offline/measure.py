"""Timing one engine in this process: first tokens, decode steps, and what stands beside them.

The same method as the published figures of other engines: random token ids, sampling at
temperature 1, a warm-up of every shape; decode from runs of two output lengths.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.bench.offline.points import REPEATED_TOKENS, Point
from baton.core.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.core.request import Output, TokenOutput
    from baton.engine.llm import LLM

#: the first request of a process: prompt and output tokens
FIRST = (512, 4)


@dataclass(frozen=True)
class Run:
    """One `generate`: wall seconds, engine steps, and seconds of host work around them."""

    seconds: float
    steps: int
    host_seconds: float


@dataclass(frozen=True)
class Timed:
    """A point's figures in milliseconds: time to the first token, or time per decode step.

    samples: one for each repeat; `ms` is their median.
    host_ms: host work (plan, launch, collect, commit) per step.
    steps: engine steps of one sample (decode: those between the two output lengths, which differ
        from `decode_steps` when requests were preempted or prompts cut differently).
    full_batch: median and 90th percentile of the gaps between commits of steps that decode the
        whole batch; None for first tokens, and where there was no such pair of steps.
    """

    samples: tuple[float, ...]
    host_ms: float
    steps: int
    full_batch: tuple[float, float] | None = None

    @property
    def ms(self) -> float:
        """The point's figure."""
        return statistics.median(self.samples)


class _Meter:
    """Notes the gaps between full decode steps, in seconds."""

    def __init__(self, batch: int, on_full: Callable[[], None] | None = None) -> None:
        self._batch, self._on_full = batch, on_full
        self._last: float | None = None
        self.gaps: list[float] = []

    def __call__(self, outputs: Sequence[TokenOutput]) -> None:
        """A step with these outputs has been committed."""
        now = time.perf_counter()
        if len(outputs) != self._batch or any(out.finish_reason for out in outputs):
            self._last = None
            return
        if self._last is not None:
            self.gaps.append(now - self._last)
        self._last = now
        if self._on_full is not None:
            self._on_full()


class Stopwatch:
    """Times a running `LLM`. Prompts are random ids, the same ones for the same seed."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self.llm = llm
        vocab = llm.config.model.vocab_size
        self._ids = range(min(10, vocab // 2), min(100_000, vocab))
        self._random = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        """New random ids."""
        return self._random.choices(self._ids, k=length)

    def first_request(self) -> float:
        """Answer one short prompt; returns when its first token came, in `time.monotonic()`."""
        tokens = FIRST[1]
        length = max(1, min(FIRST[0], self.llm.config.max_model_len - tokens - 1))
        output = self._generate([self.prompt(length)], tokens)[0]
        assert output.timing is not None, "a finished output has its times"
        return output.timing.first_token

    def ttft(self, point: Point, repeats: int) -> Timed:
        """Wall time of one prompt with one output token, another prompt each time, after one that
        is as long or long enough to be computed in the same chunks."""
        self._run([self.prompt(min(point.context, REPEATED_TOKENS))], 1)
        runs = [self._run([self.prompt(point.context)], 1) for _ in range(repeats)]
        return Timed(
            samples=tuple(run.seconds * 1e3 for run in runs),
            host_ms=statistics.median(run.host_seconds / run.steps for run in runs) * 1e3,
            steps=runs[-1].steps,
        )

    def decode(self, point: Point, repeats: int) -> Timed:
        """`(time of 1 + N output tokens - time of 1) / N` for the same prompts."""
        prompts = [self.prompt(point.context) for _ in range(point.batch)]
        self._run(prompts, 2)
        samples, host, gaps, steps = [], [], list[float](), 0
        for _ in range(repeats):
            short = self._run(prompts, 1)
            meter = _Meter(point.batch)
            with self.llm.watched(meter):
                long = self._run(prompts, 1 + point.decode_steps)
            steps = long.steps - short.steps
            samples.append((long.seconds - short.seconds) / point.decode_steps * 1e3)
            host.append((long.host_seconds - short.host_seconds) / max(1, steps) * 1e3)
            gaps += meter.gaps
        return Timed(tuple(samples), statistics.median(host), steps, _spread(gaps))

    def watch(self, point: Point, on_full: Callable[[], None]) -> None:
        """Run a decode point once more, calling `on_full` after every full decode step."""
        prompts = [self.prompt(point.context) for _ in range(point.batch)]
        with self.llm.watched(_Meter(point.batch, on_full)):
            self._run(prompts, 1 + point.decode_steps)

    def _run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        before = self.llm.stats()
        begin = time.perf_counter()
        self._generate(prompts, tokens)
        seconds = time.perf_counter() - begin
        after = self.llm.stats()
        return Run(seconds, after.steps - before.steps, after.host_seconds - before.host_seconds)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Output]:
        sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        return self.llm.generate(prompts, sampling)


def _spread(gaps: Sequence[float]) -> tuple[float, float] | None:
    """Median and 90th percentile in milliseconds."""
    if not gaps:
        return None
    ordered = sorted(gaps)
    return statistics.median(ordered) * 1e3, ordered[int(0.9 * (len(ordered) - 1))] * 1e3
