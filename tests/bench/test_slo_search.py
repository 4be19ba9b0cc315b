"""The search finds capacities that were planted, and says so when there is none to find."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baton.bench.metrics import Slo
from baton.bench.record import Load, Record, Run
from baton.bench.runfile import read_run
from baton.bench.slo.disk import OtherSearch, kept
from baton.bench.slo.level import Goal, condense
from baton.bench.slo.loads import Point, five, front
from baton.bench.slo.run import Stop
from baton.bench.slo.saturation import saturated
from baton.bench.slo.search import Found, Plan, search
from baton.core.errors import ConfigError
from helpers.planted import TPOT, TTFT, planted, queue, value
from helpers.runs import write_run

CAPACITY = 7.3
GOAL = Goal(slo=Slo(ttft=TTFT, tpot=TPOT), attainment=0.95)
ONE = Plan(start=1.0, highest=100, table=False)


def logistic(steep: float) -> Callable[[float], float]:
    odds = math.log(0.95 / 0.05)
    return lambda x: 1 / (1 + math.exp(steep * math.log(x / CAPACITY) - odds))


CURVES: dict[str, Callable[[float], float]] = {
    "gentle": logistic(6),
    "steep": logistic(25),
    "power": lambda x: max(0.0, 1 - 0.05 * (x / CAPACITY) ** 4),
    "cliff": lambda x: 0.99 if x <= CAPACITY else 0.3,
    "shoulder": lambda x: 0.985 - 0.035 * (x / CAPACITY) ** 6 if x < 2 * CAPACITY else 0.0,
}


def miss(found: Found, truth: float = CAPACITY) -> float:
    """Share by which the answer differs from the truth."""
    return abs((found.capacity or 0.0) / truth - 1)


def found_with(name: str, seeds: range, **changes: float | str) -> list[Found]:
    return [
        search(planted(CURVES[name], requests=300, seed=seed, **changes), GOAL, ONE)
        for seed in seeds
    ]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("changes", [{}, {"kind": "tpot"}, {"wobble": 0.01}], ids=str)
def test_planted_capacity_within_5_percent(name: str, changes: dict[str, float | str]) -> None:
    """`wobble`: every run at a speed of its own, by 1% (one standard deviation)."""
    found = found_with(name, range(4), **changes)
    assert all(f.edges["all"].state == "found" for f in found)
    assert max(map(miss, found)) <= 0.05, [f.capacity for f in found]
    # doublings, bisections and at most two more at either end, seldom an edge that moved
    assert max(f.runs for f in found) <= 26


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("changes", [{}, {"kind": "tpot"}, {"wobble": 0.01}], ids=str)
def test_planted_capacity_with_many_seeds(name: str, changes: dict[str, float | str]) -> None:
    found = found_with(name, range(60), **changes)
    assert sum(miss(f) <= 0.05 for f in found) >= 57, [f.capacity for f in found]
    assert max(map(miss, found)) < 0.1


def test_capacity_of_a_real_queue() -> None:
    """Its truth, by simulating 60,000 requests at each rate: 95% wait at most 1 s at 2.61 a second
    for four slots of 1 s each."""
    goal = Goal(slo=Slo(ttft=1.0))
    plan = Plan(start=0.5, highest=100, table=False)
    found = [search(queue(4, 1.0, requests=1000, seed=s), goal, plan) for s in range(5)]
    assert sum(miss(f, 2.608) <= 0.05 for f in found) >= 4, [f.capacity for f in found]


def test_a_cliff_is_named_and_a_slope_is_not() -> None:
    steep = search(planted(CURVES["cliff"], requests=300), GOAL, ONE).edges["all"]
    assert steep.cliff is not None
    assert "of requests meet it at" in steep.cliff
    gentle = search(planted(CURVES["gentle"], requests=300), GOAL, ONE).edges["all"]
    assert gentle.cliff is None


def test_the_doubt_of_an_answer_is_given_and_holds_the_truth() -> None:
    held = 0
    for seed in range(10):
        line = search(planted(CURVES["gentle"], requests=300, seed=seed), GOAL, ONE).edges["all"]
        assert line.sure_meets is not None
        held += line.sure_meets <= CAPACITY <= (line.sure_fails or math.inf)
    assert held >= 9


def test_every_objective_has_its_own_edge_and_the_five_loads_differ() -> None:
    both = planted(lambda x: 1.0 if x <= 12 else 0.2, kind="tpot", fails_at=40)

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        run = both(load, replicate, stretch)
        if value(load) > 5:
            for record in run.records:
                record.arrivals = [at + 2 * TTFT for at in record.arrivals]
        return run

    found = search(measure, GOAL, Plan(start=1, highest=1000))
    rows = {row.name: row for row in five(found)}
    for name, truth in {"ttft": 5, "all": 5, "tpot": 12, "success": 40}.items():
        assert rows[name].load == pytest.approx(truth, rel=0.05), name
        assert found.edges[name].state == "found"
    assert list(rows) == ["success", "peak", "ttft", "tpot", "all"]
    assert rows["peak"].load == max(level.load for level in found.levels)
    assert found.runs <= 40


def test_concurrency_is_searched_in_whole_requests() -> None:
    plan = Plan(vary="concurrency", start=1, highest=512, table=False)
    found = search(planted(lambda x: 1.0 if x <= 37 else 0.5), GOAL, plan)
    assert found.capacity in (36, 37)
    assert found.level(found.capacity).load == found.capacity
    small = search(planted(lambda x: 1.0 if x <= 3 else 0.5), GOAL, plan)
    assert (small.capacity, small.edges["all"].fails) == (3, 4)


@pytest.mark.parametrize("share, state", [(1.0, "above"), (0.5, "below")])
def test_no_edge_within_what_was_offered(share: float, state: str) -> None:
    found = search(planted(lambda x: share), GOAL, Plan(start=1, highest=32, table=False))
    assert found.edges["all"].state == state
    assert found.capacity == (32 if state == "above" else None)


def test_runs_are_bounded_and_the_bound_is_told() -> None:
    found = search(planted(CURVES["gentle"]), GOAL, Plan(start=0.01, most_runs=5, table=False))
    assert (found.runs, found.edges["all"].state) == (5, "open")
    assert "limit of 5 runs" in found.notes[0]


def test_a_curve_that_rises_again_is_told_and_the_lower_edge_given() -> None:
    def dip(x: float) -> float:
        return 0.5 if 3 < x < 5 or x > 20 else 1.0

    # 4 fails without doubt, 8 meets without doubt when the search comes from above
    found = search(planted(dip), GOAL, Plan(start=8, highest=100, table=False))
    assert found.edges["all"].state == "found"
    far = search(planted(lambda x: 1.0 if x in (1, 8) or x < 3 else 0.5), GOAL, ONE)
    assert far.capacity == pytest.approx(3, rel=0.05)


def test_a_noisy_early_verdict_is_taken_back() -> None:
    steady = planted(CURVES["steep"], requests=300)
    unlucky = planted(lambda x: 0.94, requests=300)

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        first_at_four = value(load) == 4 and replicate == 0
        return (unlucky if first_at_four else steady)(load, replicate, stretch)

    assert miss(search(measure, GOAL, ONE)) <= 0.05


def test_a_client_that_cannot_keep_up_limits_the_search() -> None:
    steady = planted(lambda x: 1.0)

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        run = steady(load, replicate, stretch)
        run.invalid = ["the client was late"] if value(load) > 6 else []
        return run

    found = search(measure, GOAL, ONE)
    assert found.capacity == pytest.approx(6, rel=0.05)
    assert found.edges["all"].fails is None
    assert "the client cannot offer" in found.notes[0]
    assert five(found)[0].mark == ">="


def test_a_ceiling_that_is_no_whole_number_ends_the_search() -> None:
    plan = Plan(vary="concurrency", start=1, highest=10.4)
    found = search(planted(lambda x: 1.0), GOAL, plan)
    assert (found.capacity, found.edges["all"].state, found.runs) == (10, "above", 5)


def test_a_load_that_the_client_missed_once_is_no_limit() -> None:
    steady = planted(lambda x: 1.0 if x <= 20 else 0.2)

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        run = steady(load, replicate, stretch)
        run.invalid = ["hiccup"] if value(load) == 4 and replicate == 0 else []
        return run

    found = search(measure, GOAL, ONE)
    assert found.capacity == pytest.approx(20, rel=0.05)
    assert found.notes == []


def test_saturation_needs_both_slopes() -> None:
    def records(rate: float, seed: int = 0) -> Run:
        return queue(4, 1.0, requests=300, seed=seed)(Load(rate=rate), 0, 1)

    assert "in flight grows" in (saturated(records(8.0).records) or "")
    assert not any(saturated(records(2.0, seed).records) for seed in range(20))
    assert saturated(records(8.0).records[:40]) is None
    # answers that take longer and longer at the same TTFT: in flight grows, TTFT does not
    run = planted(lambda x: 1.0)(Load(rate=10), 0, 1)
    for i, record in enumerate(run.records):
        record.end += 0.1 * i
    assert saturated(run.records) is None


def test_a_saturated_load_meets_nothing_however_well_it_began() -> None:
    patient = Goal(slo=Slo(ttft=1000.0))
    trial = condense(queue(4, 1.0)(Load(rate=8.0), 0, 1), patient)
    assert trial.met["all"] == trial.sent
    found = search(queue(4, 1.0), patient, Plan(start=0.5, highest=64, table=False))
    assert found.capacity == pytest.approx(4, rel=0.1)
    assert "falls behind" in (found.edges["all"].cliff or "")


def test_a_run_is_stopped_once_it_is_lost_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.bench.slo.run.LOOK", 0.0)

    def stopped_after(rate: float, limit: float = 1.0) -> int | None:
        records = sorted(
            queue(4, 1.0, requests=400)(Load(rate=rate), 0, 1).records, key=lambda r: r.end
        )
        stop = Stop(Goal(slo=Slo(ttft=limit), attainment=0.9), len(records))
        for done in range(0, len(records), 10):
            stop.records(records[done : done + 10])
            if stop():
                return done + 10
        return None

    over = stopped_after(8.0)
    assert over is not None
    # not before the goal is lost: a tenth of all requests may miss
    assert 40 < over < 300
    assert stopped_after(2.0) is None
    # the queue grows, but nothing has missed so far
    assert stopped_after(8.0, limit=1e6) is None
    warm = Record(index=0, scheduled=0, sent=0, end=9, arrivals=[9], phase="warm")
    stop = Stop(Goal(slo=Slo(ttft=1.0)), 1)
    stop.records([warm] * 100)
    assert not stop()


def test_an_interrupted_search_goes_on_from_its_files(tmp_path: Path) -> None:
    about = {"name": "planted", "seed": 3}
    server = planted(CURVES["steep"], seed=3)
    offered: list[str] = []

    def offer(load: Load, stretch: int, file: Path) -> Run:
        if len(offered) == 6:
            raise KeyboardInterrupt
        offered.append(file.name)
        run = server(load, int(file.stem.rpartition("-")[2]) - 1, stretch)
        run.workload = dict(about)
        write_run(file, run)
        return run

    with pytest.raises(KeyboardInterrupt):
        search(kept(tmp_path, about, offer, resume=False), GOAL, ONE)
    with pytest.raises(OtherSearch, match="already holds 6 runs"):
        kept(tmp_path, about, offer, resume=False)
    first, offered[:] = offered.copy(), ["counted"] * 7
    found = search(kept(tmp_path, about, offer, resume=True), GOAL, ONE)
    again = {name for name in offered if name != "counted"}
    assert not again & set(first)
    whole = search(planted(CURVES["steep"], seed=3), GOAL, ONE)
    assert found.capacity == whole.capacity
    assert found.runs == whole.runs == len(first) + len(again)
    with pytest.raises(OtherSearch, match="its run has seed 3, this search 4"):
        search(kept(tmp_path, {"seed": 4}, offer, resume=True), GOAL, ONE)


def test_a_run_that_was_cut_short_is_run_again(tmp_path: Path) -> None:
    server, offered = planted(CURVES["cliff"]), []

    def offer(load: Load, stretch: int, file: Path) -> Run:
        offered.append(file.name)
        run = server(load, 0, stretch)
        write_run(file, run)
        return run

    kept(tmp_path, {}, offer, resume=False)(Load(rate=1.0), 0, 1)
    file = tmp_path / "rate-1-1.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:50]))
    again = kept(tmp_path, {}, offer, resume=True)(Load(rate=1.0), 0, 1)
    assert offered == ["rate-1-1.jsonl"] * 2
    assert len(read_run(file).records) == len(again.records) == 300


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Goal(slo=Slo()), "no objective"),
        (lambda: Goal(slo=Slo(ttft=-1.0)), "--ttft must be more than 0 s, got -1"),
        (lambda: Goal(slo=Slo(ttft=1.0), attainment=95), "above 0 and at most 1"),
        (lambda: Plan(start=0), "first load"),
        (lambda: Plan(tolerance=0), "--tolerance"),
        (lambda: Plan(most_runs=0), "--most-runs"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_the_front_keeps_what_nothing_beats() -> None:
    points = [
        Point(config=name, load="", gain=gain, cost=cost)
        for name, gain, cost in (("a", 10, 1), ("b", 9, 2), ("c", 20, 3), ("d", 20, 4), ("e", 5, 1))
    ]
    assert [p.config for p in front(points) if p.front] == ["a", "c"]
    assert len(msgspec.json.encode(front(points))) > 0
