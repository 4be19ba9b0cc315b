"""Workloads: lengths, sharing, prompts, arrival times."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from baton.bench.load.arrivals import arrival_times
from baton.bench.load.run import plan_units
from baton.bench.record import Load
from baton.bench.workload.job import Job, WorkloadError
from baton.bench.workload.prefix import prefix
from baton.bench.workload.prompts import TextPrompts, TokenPrompts
from baton.bench.workload.replay import Scales, replay, with_shared
from baton.bench.workload.session import Sessions, session
from baton.bench.workload.shapes import BUCKETS, control, fixed, grid, mixed
from baton.bench.workload.synth import Traffic, synthesize
from baton.core.errors import ConfigError
from helpers.paper import paper_lru


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


def test_prompts_are_functions_of_seed_id_and_position() -> None:
    made = TokenPrompts((256, 32000))
    long, short = made.ids([(5, 1000)]), made.ids([(5, 300)])
    assert long[:300] == short
    assert made.ids([(9, 10), (5, 300)])[10:] == short
    assert TokenPrompts((256, 32000), seed=1).ids([(5, 300)])[0] != short[0]
    assert 256 <= min(long) <= max(long) < 32000
    assert len(set(long)) > 900


def test_json_of_ids_is_what_ids_says() -> None:
    for vocab in ((3, 320), (0, 9), (99_000, 131_072)):
        made = TokenPrompts(vocab, seed=2)
        segments = [(1, 5), (2**50, 700), (3, 1)]
        assert json.loads(made.json(segments)) == made.ids(segments)


def test_segments_stay_apart_even_in_a_tiny_vocabulary() -> None:
    made = TokenPrompts((0, 10))
    assert made.digits(9) == 1
    assert made.digits(10) == 2
    starts = {tuple(made.ids([(i, 3)])) for i in range(100, 1000)}
    assert len(starts) == 900
    for vocab in ((5, 6), (9, 3), (-1, 9)):
        with pytest.raises(ConfigError, match="vocabulary range"):
            TokenPrompts(vocab)


def test_text_prompts_share_and_have_the_length(tmp_path: Path) -> None:
    made = TextPrompts()
    a, b = made.text([(1, 500), (2, 100)]), made.text([(1, 500), (3, 100)])
    assert len(a) == len(b) == 2640
    assert a[:2200] == b[:2200]
    assert a[2200:] != b[2200:]
    assert json.loads(made.json([(1, 50)])) == made.text([(1, 50)])
    chat = json.loads(TextPrompts(chat=True).json([(1, 50)]))
    assert chat == [{"role": "user", "content": made.text([(1, 50)])}]
    own = tmp_path / "words.txt"
    own.write_text("baton " * 20)
    assert "baton baton" in TextPrompts(corpus=own).text([(1, 50)])
    own.write_text(" \n")
    with pytest.raises(WorkloadError, match="no words"):
        TextPrompts(corpus=own)
    with pytest.raises(WorkloadError, match="No such file"):
        TextPrompts(corpus=tmp_path / "absent")


@pytest.mark.parametrize("scale", [Fraction(1, 64), Fraction(1, 3), Fraction(1), Fraction(4)])
def test_scaling_keeps_exactly_the_shared_blocks(scale: Fraction) -> None:
    jobs = synthesize(40, seed=3, traffic=Traffic(pause_median=1.0, first_median=3000))
    scaled = replay(jobs, Scales(length=scale, output=scale), "s").jobs
    made = TokenPrompts()
    prompts = [made.ids(job.segments) for job in scaled]
    block = round(512 * scale)
    pairs = 0
    for i, a in enumerate(jobs):
        for j in range(i):
            ids = [[number for number, _ in job.segments] for job in (a, jobs[j])]
            shared = common(*ids)
            if shared == min(map(len, ids)):
                continue  # one may be a prefix of the other: its tail decides
            assert common(prompts[i], prompts[j]) == shared * block
            pairs += 1
    assert pairs > 100
    # what is stated as shared is what an endless cache of single tokens finds
    assert [job.shared for job in scaled] == paper_lru(prompts, 1, None).per_request


def test_shared_by_hand() -> None:
    a = Job(((1, 10), (2, 10)), 1)
    jobs = [a, a, Job(((1, 10), (3, 5)), 1), Job(((1, 4),), 1), Job(((1, 20),), 1), a]
    assert [job.shared for job in with_shared(jobs)] == [0, 19, 10, 3, 10, 19]


def test_replay_scales_time_loops_and_cuts() -> None:
    jobs = [Job(((0, 512), (1, 512), (2, 1)), 100, 2.0), Job(((0, 512),), 1, 4.0)]
    made = replay(jobs, Scales(time=0.5, length=Fraction(1, 64), output=Fraction(1, 64)), "t")
    assert [(j.at, j.length, j.max_tokens) for j in made.jobs] == [(0, 17, 2), (1, 8, 1)]
    assert made.about["trace_seconds"] == 2.0
    assert made.about["block"] == 8
    cut = replay(jobs, Scales(max_tokens=600), "t")
    assert [(j.length, j.max_tokens) for j in cut.jobs] == [(512 - 12, 100), (512, 1)]
    assert cut.about["cut"] == 1
    twice = replay(jobs, Scales(loops=2), "t").jobs
    assert [j.at for j in twice] == [0, 2, 4, 6]
    assert [j.shared for j in twice] == [0, 511, 0, 511]  # the second loop has its own prompts
    for bad in ({"time": -1}, {"length": Fraction(0)}, {"loops": 0}, {"max_tokens": 1}):
        with pytest.raises(WorkloadError):
            Scales(**bad)


def test_mixed_and_its_control_have_the_same_totals() -> None:
    made = mixed(BUCKETS, 1024, 200, seed=3)
    groups = Counter(job.group for job in made.jobs)
    assert groups == {"1K": 80, "4K": 50, "16K": 30, "64K": 20, "128K": 12, "192K": 8}
    other = control(made)
    for total in (lambda j: j.length, lambda j: j.max_tokens, lambda _: 1):
        assert sum(map(total, made.jobs)) == sum(map(total, other.jobs))
    assert max(job.length for job in other.jobs) - min(job.length for job in other.jobs) <= 1
    assert sum(j.max_tokens for j in made.jobs) / 200 == pytest.approx(1024, rel=0.15)
    assert made == mixed(BUCKETS, 1024, 200, seed=3)
    assert [j.group for j in made.jobs] != [j.group for j in mixed(BUCKETS, 9, 200, seed=4).jobs]
    for bad in ({}, {0: 1.0}, {5: 0.0}):
        with pytest.raises(WorkloadError, match="buckets"):
            mixed(bad, 10, 10)


def test_grid_is_every_combination() -> None:
    points = grid([1024, 100], [8], [1, 3], rounds=5)
    assert [p.name for p in points] == ["1K-8-c1", "1K-8-c3", "100-8-c1", "100-8-c3"]
    assert [len(p.workload.jobs) for p in points] == [5, 15, 5, 15]
    assert points[1].load == Load(kind="closed", concurrency=3)
    ids = [job.segments[0][0] for _, jobs in points[1].workload.before for job in jobs]
    assert not {job.segments[0][0] for job in points[1].workload.jobs} & set(ids)
    with pytest.raises(WorkloadError, match="osl must be at least 1"):
        fixed(10, 0, 1)


def test_prefix_groups_are_exact() -> None:
    made = prefix([256, 1024], page=16, requests=6, prefixes=2)
    assert set(made.expected_hit) == {f"{n} {h}%" for n in (256, "1K") for h in (0, 20, 50, 80)}
    assert [made.expected_hit[f"1K {h}%"] for h in (0, 20, 50, 80)] == [0, 0.2, 0.5, 0.8]
    assert made.expected_hit["256 80%"] == pytest.approx(0.8)
    prime = [job.segments[0] for phase, jobs in made.before if phase == "prime" for job in jobs]
    assert len(prime) == len(set(prime)) == 2 * 3 * 2
    for job in made.jobs:
        assert (job.segments[0] in prime) == (job.shared > 0)
    unique = [segment for job in made.jobs for segment in job.segments[job.shared > 0 :]]
    assert len({number for number, _ in unique}) == len(made.jobs)
    for lengths, hits, words in (([250], [0.5], "multiple"), ([256], [1.0], "below 1")):
        with pytest.raises(WorkloadError, match=words):
            prefix(lengths, hits, page=16)


def test_sessions_grow() -> None:
    made = session(Sessions(sessions=2, turns=3, system=32, first=10, message=5, osl=4, think=1.0))
    assert [job.length for job in made.jobs[:3]] == [42, 51, 60]
    assert [job.shared for job in made.jobs] == [0, 42, 51, 32, 42, 51]
    assert [job.turn for job in made.jobs] == [0, 1, 2] * 2
    first, second = made.jobs[0].segments, made.jobs[1].segments
    assert second[: len(first)] == first
    assert made.jobs[0].think == 0.0
    assert made.jobs[1].think > 0
    with pytest.raises(WorkloadError, match="at least 1"):
        session(Sessions(turns=0))


def test_arrivals_have_rate_and_burstiness() -> None:
    for shape in (0.25, 1.0, 4.0):
        times = np.array(arrival_times(Load(rate=5.0, burstiness=shape), 20_000, seed=1))
        gaps = np.diff(times)
        assert times[0] == 0.0
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)
    assert arrival_times(Load(rate=5.0), 9, seed=1) == arrival_times(Load(rate=5.0), 9, seed=1)
    assert arrival_times(Load(rate=5.0), 9, seed=1) != arrival_times(Load(rate=5.0), 9, seed=2)


@pytest.mark.parametrize(
    "ramp, first, last",
    [("linear:2:8", 2, 8), ("linear:8:2", 8, 2), ("exp:1:9", 1, 9), ("steps:2,4,8", 2, 8)],
)
def test_ramps_change_the_rate(ramp: str, first: float, last: float) -> None:
    times = np.array(arrival_times(Load(ramp=ramp), 30_000, seed=1))
    assert np.all(np.diff(times) >= 0)
    slice_ = times[-1] / 50
    begin = np.sum(times < slice_) / slice_
    end = np.sum(times > times[-1] - slice_) / slice_
    assert begin == pytest.approx(first, rel=0.15)
    assert end == pytest.approx(last, rel=0.15)


@pytest.mark.parametrize(
    "load",
    [
        Load(),
        Load(rate=0.0),
        Load(rate=1.0, burstiness=0.0),
        Load(rate=1.0, burstiness=float("inf")),
        Load(ramp="linear:1"),
        Load(ramp="exp:0:5"),
        Load(ramp="steps:"),
        Load(ramp="up:1:2"),
        Load(kind="closed"),
        Load(kind="closed", concurrency=0),
    ],
)
def test_loads_without_sense_are_refused(load: Load) -> None:
    with pytest.raises(ConfigError):
        plan_units([Job(((0, 1),), 1)], load)


def test_units_of_traces_sessions_and_rates() -> None:
    trace = [Job(((0, 1),), 1, 3.0), Job(((1, 1),), 1, 5.0), Job(((2, 1),), 1, 7.0)]
    assert [unit.at for unit in plan_units(trace, Load())] == [0.0, 2.0, 4.0]
    assert [unit.at for unit in plan_units(trace, Load(rate=2.0))] == [0.0, 0.5, 1.0]
    turns = session(Sessions(sessions=500, turns=4)).jobs
    units = plan_units(turns, Load(rate=8.0))
    assert [len(unit.jobs) for unit in units] == [4] * 500
    assert 500 / (units[-1].at or 1) == pytest.approx(2.0, rel=0.15)
    assert {unit.at for unit in plan_units(turns, Load(kind="closed", concurrency=2))} == {None}
    with pytest.raises(ConfigError, match="no requests"):
        plan_units([], Load(rate=1.0))
