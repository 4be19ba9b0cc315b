"""What the GPU did during a few decode steps: a profiler trace, its idle share, its kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: full decode steps that pass before the trace starts, and steps in it
SKIPPED, TRACED = 4, 12
#: microseconds between two kernels of a graph, at most: 0.3 to 1.0 on an H200
HANDOVER = 1.5


@dataclass(frozen=True)
class Activity:
    """Device time over the traced steps, in microseconds.

    span: from the first kernel's start to the last one's end. busy: with at least one kernel
    running. longest_gap: longest time without. waiting: all time without of which a piece is longer
    than the device takes from one kernel of a graph to the next (`HANDOVER`): there it had nothing
    to do. kernels: time by kernel name, most first.
    """

    steps: int
    span: float
    busy: float
    longest_gap: float
    waiting: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        """Share of the span in which nothing ran."""
        return 1.0 - self.busy / self.span if self.span else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the span in which the device had nothing to do."""
        return self.waiting / self.span if self.span else 0.0


def activity(kernels: Sequence[tuple[str, float, float]], steps: int, top: int = 8) -> Activity:
    """From `(name, start, end)` of every kernel, in any order, in microseconds."""
    busy = longest = waiting = 0.0
    if not kernels:
        return Activity(steps, 0.0, 0.0, 0.0)
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    first, reached = ordered[0][1], ordered[0][1]
    times: defaultdict[str, float] = defaultdict(float)
    for name, start, end in ordered:
        times[name] += end - start
        longest = max(longest, start - reached)
        waiting += start - reached if start - reached > HANDOVER else 0.0
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    most = sorted(times.items(), key=lambda item: -item[1])[:top]
    return Activity(steps, reached - first, busy, longest, waiting, dict(most))


class Tracer:
    """Profiles some steps of a run: call it after every step that decodes the full batch.

    Only the device side is recorded, since recording every operation on the host would slow it
    and show idle time that is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0
        self._profile: Any = None
        self.activity: Activity | None = None

    def __call__(self) -> None:
        """One more full step was committed."""
        self._seen += 1
        if self._seen == SKIPPED:
            self._start()
        elif self._seen == SKIPPED + TRACED:
            self._stop()

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()  # starting takes long: no kernel of before may be in the trace
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def _stop(self) -> None:
        import torch

        torch.cuda.synchronize()
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        kernels = [
            (event.name, float(event.time_range.start), float(event.time_range.end))
            for event in self._profile.events()
            if event.device_type.name == "CUDA"
        ]
        self.activity = activity(kernels, TRACED)
