"""What the runs at one load say about each objective."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton.bench.metrics import Slo, measured, meets, metrics
from baton.bench.record import Run
from baton.bench.slo.saturation import saturated
from baton.bench.stats import CONFIDENCE, Interval, effective, wilson
from baton.core.errors import ConfigError

Verdict = Literal["meets", "fails", "unclear"]
#: every request answered, whatever its latency
SUCCESS = "success"
#: every objective at once
ALL = "all"


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives, and the share of sent requests that must meet them."""

    slo: Slo
    attainment: float = 0.95

    def __post_init__(self) -> None:
        if not self.slo:
            raise ConfigError("no objective: give at least one of --ttft, --tpot, --e2e")
        for name, limit in msgspec.structs.asdict(self.slo).items():
            if limit is not None and not limit > 0:
                raise ConfigError(f"--{name} must be more than 0 s, got {limit:g}")
        if not 0 < self.attainment <= 1:
            raise ConfigError(
                "--attainment must be above 0 and at most 1 (0.95 is usual), "
                f"got {self.attainment:g}"
            )

    @property
    def objectives(self) -> list[str]:
        """Names of the single objectives that there are."""
        return [n for n in ("ttft", "tpot", "e2e") if getattr(self.slo, n) is not None]

    @property
    def criteria(self) -> list[str]:
        """What an edge is looked for: all objectives, each one, and success."""
        single = self.objectives if len(self.objectives) > 1 else []
        return [ALL, *single, SUCCESS]


class Trial(msgspec.Struct, kw_only=True):
    """One run at a load, condensed.

    name: of the run, which is that of its file.
    sent / met: requests sent, and how many of them met each criterion.
    worth: independent samples that the outcomes of a criterion count for.
    throughput: requests, input, output and total tokens per second.
    latency: p50 and p95 of ttft, tpot and e2e in seconds; None where there is none.
    saturated: how the run showed that the server fell behind; None if it did not.
    invalid: why the run is no evidence (the client was too slow, for example).
    """

    name: str
    sent: int
    met: dict[str, int]
    worth: dict[str, float]
    throughput: dict[str, float | None]
    latency: dict[str, dict[str, float | None]]
    seconds: float
    saturated: str | None = None
    invalid: list[str] = []


def condense(run: Run, goal: Goal) -> Trial:
    """A run as a trial of the goal."""
    records = sorted(measured(run), key=lambda r: r.scheduled)
    numbers: dict[str, Any] = metrics(run, goal.slo)
    outcomes: dict[str, list[bool]] = {name: [] for name in goal.criteria}
    for record in records:
        met = {**meets(record, goal.slo), SUCCESS: record.status == "ok"}
        for name, kept in outcomes.items():
            kept.append(met[name])
    return Trial(
        name=run.name,
        sent=len(records),
        met={name: sum(kept) for name, kept in outcomes.items()},
        worth={name: effective(kept) for name, kept in outcomes.items()},
        throughput=numbers["throughput"],
        latency={
            name: {p: numbers["latency"][name][p] for p in ("p50", "p95")}
            for name in ("ttft", "tpot", "e2e")
        },
        seconds=numbers["seconds"],
        saturated=saturated(records) if run.load.kind == "open" else None,
        invalid=list(run.invalid),
    )


class Level(msgspec.Struct, kw_only=True):
    """A load and its trials. load: requests per second, or requests in flight."""

    load: float
    trials: list[Trial] = []

    @property
    def valid(self) -> list[Trial]:
        """Trials that are evidence."""
        return [t for t in self.trials if not t.invalid and t.sent]

    def share(self, criterion: str) -> float:
        """Share of all requests sent at this load that met the criterion."""
        sent = sum(t.sent for t in self.valid)
        return sum(t.met[criterion] for t in self.valid) / sent if sent else 0.0

    def weight(self, criterion: str) -> float:
        """Independent samples of the criterion: requests sent over how many of them, on average,
        count as one. A short run that met a quiet moment does not outweigh a long one."""
        sent = sum(t.sent for t in self.valid)
        as_one = sum(t.sent**2 / t.worth[criterion] for t in self.valid)
        return sent**2 / as_one if as_one else 0.0

    def interval(self, criterion: str) -> Interval:
        """Wilson interval of the share, for as many samples as the outcomes are worth."""
        weight = self.weight(criterion)
        return wilson(self.share(criterion) * weight, weight, CONFIDENCE)

    @property
    def saturated(self) -> str | None:
        """How the server fell behind, when it did in the trials with most of the requests."""
        behind = [t for t in self.valid if t.saturated]
        most = 2 * sum(t.sent for t in behind) > sum(t.sent for t in self.valid)
        return behind[-1].saturated if most else None

    def verdict(self, criterion: str, target: float) -> Verdict:
        """What this load's own trials say. A load that the server cannot keep up with meets
        nothing, but while its requests still do, one trial is not enough to say so. One failed
        request in the trials is enough to fail success."""
        if criterion == SUCCESS:
            word: Verdict = "meets" if self.share(SUCCESS) == 1 else "fails"
        else:
            ends = self.interval(criterion)
            word = "meets" if ends.above(target) else "fails" if ends.below(target) else "unclear"
        if self.saturated and word != "fails":
            return "unclear" if len(self.valid) < 2 else "fails"
        return word

    def mean(self, kind: str) -> float:
        """Mean throughput of the trials: `kind` per second."""
        rates = [t.throughput[kind] or 0.0 for t in self.valid]
        return sum(rates) / len(rates) if rates else 0.0
