"""Waiting requests in length lanes, so that a short prompt never stands behind a long one."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator

from baton.scheduler.state import Sequence

#: A lane ends below this many uncached prompt tokens; the last lane has no end.
LANES = (1024, 8192, 65536)
NUM_LANES = len(LANES) + 1


def lane_of(uncached: int) -> int:
    """Lane of a request with this many prompt tokens to compute; 0 is the shortest."""
    return bisect_right(LANES, uncached)


class Queue:
    """One heap per lane, by (priority, arrival). Counts are exact: a removed request leaves a
    mark in its heap that is skipped later, but no longer counts."""

    def __init__(self) -> None:
        self._heaps: list[list[tuple[tuple[int, int], Sequence]]] = [[] for _ in range(NUM_LANES)]
        self._waiting: dict[str, Sequence] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def push(self, sequence: Sequence, uncached: int) -> None:
        """Add a sequence with `uncached` tokens to compute; this fixes its lane."""
        sequence.uncached = uncached
        sequence.lane = lane_of(uncached)
        sequence.refused_at = -1
        sequence.bypassed = 0
        heapq.heappush(self._heaps[sequence.lane], (sequence.rank, sequence))
        self._waiting[sequence.request.request_id] = sequence
        self.tokens += uncached

    def head(self, lane: int) -> Sequence | None:
        """The next request of a lane."""
        heap = self._heaps[lane]
        while heap:
            sequence = heap[0][1]
            waits = self._waiting.get(sequence.request.request_id) is sequence
            if waits and sequence.lane == lane:
                return sequence
            heapq.heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands."""
        del self._waiting[sequence.request.request_id]
        self.tokens -= sequence.uncached

    def get(self, request_id: str) -> Sequence | None:
        """The waiting sequence of a request."""
        return self._waiting.get(request_id)

    def check(self) -> None:
        """Assert that the token count is that of the waiting requests."""
        assert self.tokens == sum(sequence.uncached for sequence in self), "queued tokens differ"
