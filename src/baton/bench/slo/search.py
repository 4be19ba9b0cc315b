"""The search for the load that still meets the objectives: doubling, bisection, replicates.

The next load to try follows from what is known and from nothing else:

    1. no load met the criterion yet     halve the lowest
    2. none failed it yet                double the highest
    3. both ends known                   their geometric mean, until they are close
    4. an end's interval holds the target, the answer was measured only once, or a higher load
       meets what a lower one fails      measure that load again, longer, a few times at most
    5. the criteria are settled          look for the most tokens per second

Loads are shared between criteria, so that the later ones cost few runs of their own. Searching a
falling curve takes log2(edge / start) + log2(ln 2 / ln(1 + tolerance)) runs per criterion, and at
most `replicates - 1` more at each end; `most_runs` bounds all of it in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from baton.bench.record import Load, Run
from baton.bench.slo.edge import Edge, cliff, conflicts, edge
from baton.bench.slo.level import ALL, SUCCESS, Goal, Level, Trial, condense
from baton.core.errors import ConfigError

#: `measure(load, replicate, stretch)` runs a load with `stretch` times the usual requests; equal
#: arguments may be answered from disk
Measure = Callable[[Load, int, int], Run]
#: what is shown after each run: its level, its trial, and how many runs were done
Watch = Callable[[Level, Trial, int], None]

#: a queue needs many times a request's duration to fill as far as it will
LONG_ENOUGH = 50
#: throughput must rise by more than this to be worth a higher load
MORE = 0.02
#: loads beside the peak are at most this ratio away from it in the end
NEAR_PEAK = 1.5


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to search.

    vary: "rate" (requests per second, open loop) or "concurrency" (in flight, closed loop).
    start: first load; double it, or halve it, from there.
    highest: no load above it is offered.
    tolerance: ratio - 1 between the two ends of a boundary that ends a search.
    replicates: most runs at one load.
    stretch: a load's second and later runs send so many times the requests of its first. A queue
        starts empty, so a short run near the edge is kinder than the long days after it.
    most_runs: most runs in all.
    table: also look for the boundary of each objective, of success, and for the most tokens per
        second; without it, only for the load that meets all objectives.
    burstiness: of the open loop's arrivals; see `Load`.
    """

    vary: Literal["rate", "concurrency"] = "rate"
    start: float = 1.0
    highest: float = 1e6
    tolerance: float = 0.04
    replicates: int = 3
    stretch: int = 5
    most_runs: int = 60
    table: bool = True
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.highest:
            raise ConfigError(
                f"the first load must lie above 0 and not above the highest ({self.highest:g}), "
                f"got {self.start:g}"
            )
        if not 0 < self.tolerance <= 1:
            raise ConfigError(
                f"--tolerance must be above 0 and at most 1 (0.04 is usual), got {self.tolerance:g}"
            )
        for name in ("replicates", "stretch", "most_runs"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness:g}")

    @property
    def unit(self) -> str:
        """What loads are counted in."""
        return "requests/s" if self.vary == "rate" else "in flight"

    def load(self, value: float) -> Load:
        """The load of a value."""
        if self.vary == "rate":
            return Load(kind="open", rate=value, burstiness=self.burstiness)
        return Load(kind="closed", concurrency=int(value))

    def rounded(self, value: float) -> float:
        """The load that is really offered: four digits, or a whole number of requests."""
        value = min(value, self.highest)
        return float(max(1, round(value))) if self.vary == "concurrency" else float(f"{value:.4g}")

    def close(self, low: float, high: float) -> bool:
        """Whether nothing between two loads is worth a run."""
        if high <= low * (1 + self.tolerance):
            return True
        return self.rounded(math.sqrt(low * high)) in (low, high)


class Found(msgspec.Struct, kw_only=True):
    """The end of a search.

    edges: by criterion; "all" is the answer.
    peak: load with the most tokens per second of all measured; None when no run counts.
    levels: everything measured, by rising load.
    runs / most_runs: runs used, and the bound.
    notes: what a reader must know before trusting the answer.
    """

    goal: Goal
    plan: Plan
    edges: dict[str, Edge]
    peak: float | None
    levels: list[Level]
    runs: int
    most_runs: int
    notes: list[str] = []

    @property
    def capacity(self) -> float | None:
        """Highest load found to meet all objectives."""
        return self.edges[ALL].meets

    def level(self, load: float) -> Level:
        """The level of a load that was measured."""
        return next(level for level in self.levels if level.load == load)


def search(
    measure: Measure, goal: Goal, plan: Plan, watch: Watch = lambda level, trial, runs: None
) -> Found:
    """Find the loads next to each boundary. Whatever `measure` raises ends the search; what it has
    stored by then is found again when it answers from disk."""
    return _Search(measure, goal, plan, watch).run()


class _Search:
    """The levels so far, and the next one."""

    def __init__(self, measure: Measure, goal: Goal, plan: Plan, watch: Watch) -> None:
        self._measure, self._goal, self._plan, self._watch = measure, goal, plan, watch
        self._levels: dict[float, Level] = {}
        self._runs = 0

    def run(self) -> Found:
        criteria = self._goal.criteria if self._plan.table else [ALL]
        while self._more() and (load := self._first(criteria)) is not None:
            self._probe(load)
        edges = {criterion: self._edge(criterion) for criterion in criteria}
        return Found(
            goal=self._goal,
            plan=self._plan,
            edges=edges,
            peak=self._peak(),
            levels=self._sorted(),
            runs=self._runs,
            most_runs=self._plan.most_runs,
            notes=self._notes(edges),
        )

    def _first(self, criteria: Sequence[str]) -> float | None:
        """The next load of the first criterion that is not settled: a run made for one may unsettle
        another. Then the next towards the peak."""
        wanted = (self._next(criterion) for criterion in criteria)
        load = next((load for load in wanted if load is not None), None)
        return self._towards_peak() if load is None and self._plan.table else load

    def _more(self) -> bool:
        return self._runs < self._plan.most_runs

    def _sorted(self) -> list[Level]:
        return [self._levels[load] for load in sorted(self._levels)]

    def _probe(self, load: float) -> None:
        level = self._levels.setdefault(load, Level(load=load))
        replicate = len(level.trials)
        run = self._measure(
            self._plan.load(load), replicate, self._plan.stretch if replicate else 1
        )
        trial = condense(run, self._goal)
        level.trials.append(trial)
        self._runs += 1
        self._watch(level, trial, self._runs)

    def _next(self, criterion: str) -> float | None:
        """The load to measure for the criterion, or None when its boundary is settled."""
        plan, target = self._plan, self._goal.attainment
        if not self._levels:
            return plan.rounded(plan.start)
        again = [load for load, level in self._levels.items() if not level.valid]
        for load in again:  # a run that was no evidence gets one more chance
            if len(self._levels[load].trials) < min(2, plan.replicates):
                return load
        now = edge(self._sorted(), criterion, target)
        top = max(self._levels)
        fails = now.fails if now.fails is not None else self._limit
        if fails is None:
            return self._double(top)
        if now.meets is None:
            lower = plan.rounded(min(self._levels) / 2)
            settled = lower in self._levels or lower < plan.start / 2**10
            return self._replicate(criterion, [now.fails]) if settled else lower
        if not plan.close(now.meets, fails):
            return plan.rounded(math.sqrt(now.meets * fails))
        odd = [load for pair in conflicts(self._sorted(), criterion, target) for load in pair]
        once = [now.meets] if criterion == ALL and len(self._levels[now.meets].trials) < 2 else []
        return self._replicate(criterion, [now.meets, now.fails], [*odd, *once])

    def _double(self, load: float) -> float | None:
        higher = self._plan.rounded(2 * load)
        return higher if higher > load else None

    @property
    def _limit(self) -> float | None:
        """The load above all valid ones that gave no valid run, again and again: the client cannot
        offer it."""
        tries = min(2, self._plan.replicates)
        valid = max((level.load for level in self._levels.values() if level.valid), default=0.0)
        beyond = [
            level.load
            for level in self._levels.values()
            if not level.valid and len(level.trials) >= tries and level.load > valid
        ]
        return min(beyond, default=None)

    def _replicate(
        self, criterion: str, ends: Sequence[float | None], anyway: Sequence[float] = ()
    ) -> float | None:
        """The load measured least of the ends that are in doubt and those to be measured `anyway`;
        None when there is none that was not measured often enough."""
        target = self._goal.attainment
        doubtful = [
            load
            for load in ends
            if load is not None and self._levels[load].verdict(criterion, target) == "unclear"
        ]
        left = [
            load
            for load in (*doubtful, *anyway)
            if len(self._levels[load].trials) < self._plan.replicates
        ]
        return min(left, key=lambda load: len(self._levels[load].trials), default=None)

    def _towards_peak(self) -> float | None:
        """A load beside the highest throughput so far that may have more, or None."""
        peak, plan = self._peak(), self._plan
        if peak is None:
            return None
        known = [level.load for level in self._sorted() if level.valid]
        at, best = known.index(peak), self._levels[peak].mean("total")
        if at == len(known) - 1:
            flat = at > 0 and best <= (1 + MORE) * self._levels[known[at - 1]].mean("total")
            if flat or self._levels[peak].saturated or self._limit is not None:
                return None
            return self._double(peak)
        if plan.vary == "rate":
            return None  # what an open loop serves rises to a plateau; there is no summit to climb
        for low, high in ((peak, known[at + 1]), (known[at - 1] if at else peak, peak)):
            between = plan.rounded(math.sqrt(low * high))
            if high > low * NEAR_PEAK and between not in (low, high):
                return between
        return None

    def _peak(self) -> float | None:
        valid = [level for level in self._sorted() if level.valid]
        return max(valid, key=lambda level: level.mean("total")).load if valid else None

    def _edge(self, criterion: str) -> Edge:
        found = edge(self._sorted(), criterion, self._goal.attainment)
        ended = self._next(criterion) is None
        if found.meets is None and found.fails is not None and ended:
            found.state = "below"
        elif found.fails is None and ended:
            found.state = "above"
        elif found.meets is not None and found.fails is not None and ended:
            found.state = "found"
        steep = (1 + self._plan.tolerance) ** 2
        found.cliff = cliff(found, self._levels, self._plan.unit, steep)
        return found

    def _notes(self, edges: dict[str, Edge]) -> list[str]:
        unit, notes = self._plan.unit, []
        if not self._more() and any(found.state == "open" for found in edges.values()):
            notes.append(
                f"the limit of {self._plan.most_runs} runs came before every boundary was found"
            )
        if self._limit is not None:
            why = self._levels[self._limit].trials[-1].invalid or ["it sent nothing that counts"]
            notes.append(
                f"the client cannot offer {self._limit:g} {unit} ({why[0]}): "
                "what the server can do there is not known"
            )
        for criterion in edges:
            if criterion == SUCCESS:
                continue
            for low, high in conflicts(self._sorted(), criterion, self._goal.attainment):
                notes.append(
                    f"not monotone: {criterion} fails at {low:g} {unit} and is met at {high:g}; "
                    "the lower boundary is given"
                )
        notes += self._short_run(edges[ALL].meets)
        answer = edges[ALL].meets
        if answer is None or self._levels[answer].verdict(ALL, self._goal.attainment) != "unclear":
            return notes
        return [
            *notes,
            f"{answer:g} {unit} meets all by the curve through all loads; its own interval "
            f"includes the target after {len(self._levels[answer].trials)} runs",
        ]

    def _short_run(self, capacity: float | None) -> list[str]:
        if capacity is None or self._plan.vary != "rate":
            return []
        longest = max(self._levels[capacity].valid, key=lambda trial: trial.sent)
        request = longest.latency["e2e"]["p50"] or 0.0
        if longest.seconds >= LONG_ENOUGH * request:
            return []
        return [
            f"the longest run at {capacity:g} {self._plan.unit} lasted only "
            f"{longest.seconds / request:.0f} times as long as its median request: a queue that "
            "starts empty flatters such a run, give more --requests"
        ]
