"""What a load run leaves behind: one record per request, and what was asked of whom.

Everything the instruments print (percentiles, goodput, the five-load table, the report) is computed
from these two, so a run can be summarised again, compared or merged without being run again.
Records are streamed to JSON lines as requests end; times are seconds on the run's own clock, which
starts at the first scheduled send; each phase before the measurement has a clock of its own.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

#: raised by one when a field changes its meaning or goes away; new optional fields do not count
SCHEMA = 1

Status = Literal["ok", "error", "timeout", "cancelled"]


class Record(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request as its client saw it.

    scheduled / sent / end: when it should have been sent, was sent, and was over.
    arrivals: when stream events with generated text came; the first is the first token.
    counts: tokens in each of those events where the server tells, else empty.
    input_tokens: prompt length as asked; `reported_input` is the server's count of it.
    output_tokens: from the server's usage; None when it sent none.
    cached_tokens: prompt tokens the server took from its prefix cache; None when it does not say.
    shared_tokens: prompt tokens which an endless prefix cache of block granularity would have held.
    group: label of the shape, bucket or hit group that the request belongs to.
    session / turn: which conversation, and which request of it.
    phase: only records of "measure" count; "warm" and "prime" are kept for the reader.
    """

    index: int
    scheduled: float
    sent: float
    end: float = 0.0
    arrivals: list[float] = []
    counts: list[int] = []
    input_tokens: int = 0
    asked_output: int = 0
    reported_input: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    shared_tokens: int = 0
    finish_reason: str | None = None
    status: Status = "ok"
    error: str | None = None
    group: str = ""
    session: int | None = None
    turn: int | None = None
    phase: Literal["warm", "prime", "measure"] = "measure"


class Load(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How requests were offered.

    kind: "open" (sent at set times, whatever the server does) or "closed" (a new one when an old
        one ends).
    rate: mean requests per second of an open loop; None when a trace sets the times.
    concurrency: requests in flight of a closed loop, or the cap of an open one.
    burstiness: shape of the gamma that gaps are drawn from; 1 is Poisson, smaller is burstier.
    """

    kind: Literal["open", "closed"] = "open"
    rate: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    ramp: str | None = None


class Run(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One load run: what was asked of whom, and the records. The JSON lines hold this first.

    workload: its name and every parameter, seeds and scales included, enough to make it again.
    server: URL, model, version, fingerprint and commit, as far as the server says.
    client: machine, version of the tool, worker processes, lag in seconds by percentile.
    seconds: from the first scheduled send to the last end.
    """

    schema: int = SCHEMA
    name: str = ""
    started: str = ""
    workload: dict[str, Any] = {}
    load: Load = msgspec.field(default_factory=Load)
    server: dict[str, Any] = {}
    client: dict[str, Any] = {}
    seconds: float = 0.0
    invalid: list[str] = []
    records: list[Record] = []
