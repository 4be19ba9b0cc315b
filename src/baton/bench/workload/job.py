"""What a workload is made of: requests described by ids and lengths, not yet by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.core.errors import ConfigError

Phase = Literal["warm", "prime", "measure"]


class WorkloadError(ConfigError):
    """A workload makes no sense; names the parameter."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request as it will be sent.

    segments: (id, tokens) pairs whose token sequences make up the prompt. An id stands for one
        endless sequence: equal ids give equal tokens, so requests with the same first segments
        share exactly that prefix.
    max_tokens: tokens to generate.
    at: seconds from the start where a trace sets the times, else None: the load decides.
    shared: prompt tokens that an endless prefix cache would have held.
    session / turn: a turn is sent `think` seconds after the one before it has ended.
    """

    segments: tuple[tuple[int, int], ...]
    max_tokens: int
    at: float | None = None
    group: str = ""
    shared: int = 0
    session: int | None = None
    turn: int | None = None
    think: float = 0.0

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return sum(tokens for _, tokens in self.segments)


@dataclass(frozen=True)
class Workload:
    """Requests to measure, and those that come before.

    about: its name and every parameter, enough to make it again; goes into the run.
    before: phases that run to their end, one after the other, before anything is measured: "warm"
        brings the server up to speed, "prime" fills its prefix cache.
    before_concurrency: their requests in flight.
    reset: whether to ask the server to empty its prefix cache between warm-up and prime.
    expected_hit: share of prompt tokens that must come from the prefix cache, for each group; a
        run that misses one by more than 2 points is invalid.
    """

    jobs: Sequence[Job]
    about: dict[str, Any]
    before: tuple[tuple[Phase, Sequence[Job]], ...] = ()
    before_concurrency: int = 1
    reset: bool = False
    expected_hit: dict[str, float] = field(default_factory=dict)
