"""Device seconds between two points of a launch, without making the host wait for them."""

from __future__ import annotations

import time

import torch

_POLL = 5e-5  # seconds between looks at the device, where a wait has an end


class Stopwatch:
    """Starts when made. On CUDA it records events on the current stream; elsewhere the host, which
    is the device there, reads its clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begin = self._mark()
        self._end: torch.cuda.Event | float | None = None

    def stop(self) -> None:
        """Mark the end."""
        self._end = self._mark()

    def seconds(self, timeout: float | None = None) -> float:
        """Wait until the device has passed the end, then the seconds between the marks.

        Raises:
            TimeoutError: it has not, after `timeout` seconds; ask again.
        """
        if isinstance(self._begin, float) and isinstance(self._end, float):
            return self._end - self._begin
        assert isinstance(self._begin, torch.cuda.Event)
        assert isinstance(self._end, torch.cuda.Event)
        if timeout is None:
            self._end.synchronize()
        else:
            until = time.monotonic() + timeout
            while not self._end.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > until:
                    raise TimeoutError
                time.sleep(_POLL)
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def _mark(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
