"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import pytest

from baton.bench.metrics import (
    DEFINITIONS,
    Slo,
    by_group,
    meets,
    metrics,
    spread,
    steady_window,
    tpot,
)
from baton.bench.record import Record, Run


def record(index: int = 0, **fields: object) -> Record:
    """100 prompt tokens, 40 cached; 4 tokens at 0.5, 0.6, 0.8 and 1.0 s; sent 0.1 s late."""
    values: dict[str, object] = {
        "scheduled": 0.0,
        "sent": 0.1,
        "end": 1.1,
        "arrivals": [0.5, 0.6, 0.8, 1.0],
        "input_tokens": 100,
        "reported_input": 100,
        "output_tokens": 4,
        "cached_tokens": 40,
        "shared_tokens": 64,
    }
    return Record(index=index, **{**values, **fields})  # type: ignore[arg-type]


def failed(index: int = 9, **fields: object) -> Record:
    return record(
        index, status="error", error="HTTP 500", arrivals=[], output_tokens=None, **fields
    )


def test_one_request_by_hand() -> None:
    found = metrics(Run(records=[record()]))
    latency = found["latency"]
    assert latency["ttft"]["p50"] == 0.5
    assert latency["tpot"]["mean"] == pytest.approx(0.5 / 3)
    assert latency["itl"]["n"] == 3
    assert latency["itl"]["max"] == pytest.approx(0.2)
    assert latency["itl_token"] == latency["itl"]  # one token in each event
    assert latency["e2e"]["p99"] == 1.1
    assert latency["queue"]["p50"] == 0.1
    assert found["seconds"] == 1.1
    assert found["tokens"] == {
        "input": 100,
        "cached": 40,
        "computed": 60,
        "output": 4,
        "exact_input": True,
        "exact_output": True,
    }
    assert found["throughput"] == {
        "requests": pytest.approx(1 / 1.1),
        "input": pytest.approx(100 / 1.1),
        "computed_input": pytest.approx(60 / 1.1),
        "output": pytest.approx(4 / 1.1),
        "total": pytest.approx(104 / 1.1),
    }
    assert found["hit"] == {
        "token": 0.4,
        "block": pytest.approx(2 / 7),  # 2 whole blocks of 16 cached, 7 begun
        "request": 1.0,
        "mean_request": 0.4,
        "ideal": 0.64,
    }
    assert found["attainment"] == dict.fromkeys(("ttft", "tpot", "e2e", "all"))
    assert found["in_flight"] == {"mean": pytest.approx(1.0 / 1.1), "most": 1}


def test_failures_count_against_attainment_and_not_in_latency() -> None:
    records = [record(), record(1, arrivals=[3.0, 3.1, 3.2, 3.3], end=3.3), failed()]
    records.append(record(3, status="timeout", error="silent for 5 s"))
    found = metrics(Run(records=records), Slo(ttft=1.0, tpot=0.2))
    assert found["attainment"] == {"ttft": 0.25, "tpot": 0.5, "e2e": None, "all": 0.25}
    assert found["latency"]["ttft"]["n"] == 2
    assert found["requests"] == {
        "sent": 4,
        "ok": 2,
        "errors": 1,
        "timeouts": 1,
        "cancelled": 0,
        "failures": {"HTTP 500": 1, "silent for 5 s": 1},
    }
    assert found["goodput"] == {
        "requests": pytest.approx(1 / 3.3),
        "output_tokens": pytest.approx(4 / 3.3),
    }


def test_tokens_bundled_in_events() -> None:
    bundled = record(arrivals=[0.5, 0.7], counts=[2, 4], output_tokens=6)
    assert tpot(bundled) == pytest.approx(0.2 / 4)
    itl = metrics(Run(records=[bundled]))["latency"]
    assert itl["itl"]["mean"] == pytest.approx(0.2)
    assert (itl["itl_token"]["n"], itl["itl_token"]["mean"]) == (4, pytest.approx(0.05))
    unknown = metrics(Run(records=[record(output_tokens=9)]))["latency"]
    assert (unknown["itl"]["n"], unknown["itl_token"]["n"]) == (3, 0)


def test_a_short_answer_has_no_tpot_and_meets_it() -> None:
    short = record(arrivals=[0.5], output_tokens=1)
    assert tpot(short) is None
    assert meets(short, Slo(tpot=0.001)) == {"tpot": True, "all": True}
    assert meets(failed(), Slo(tpot=0.001)) == {"tpot": False, "all": False}


def test_a_server_that_says_nothing() -> None:
    silent = record(reported_input=None, output_tokens=None, cached_tokens=None)
    found = metrics(Run(records=[silent, record(1)]))
    # one of them says 40: then no word is none
    assert found["tokens"]["computed"] == 160
    assert (found["tokens"]["exact_input"], found["tokens"]["exact_output"]) == (False, False)
    assert found["tokens"]["output"] == 8  # one for each event
    assert found["hit"]["token"] == 0.2
    alone = metrics(Run(records=[silent]))
    assert alone["hit"]["token"] is None
    assert alone["tokens"]["computed"] is None
    assert alone["throughput"]["computed_input"] is None


def test_percentiles_say_when_samples_are_too_few() -> None:
    assert spread([1.0] * 1000)["too_few"] == []
    assert spread([1.0] * 999)["too_few"] == ["p99"]
    assert spread([1.0] * 19)["too_few"] == ["p50", "p90", "p95", "p99"]
    nothing = spread([])
    assert (nothing["n"], nothing["p50"], nothing["mean"]) == (0, None, None)
    one = spread([2.0])
    assert (one["p50"], one["std"]) == (2.0, 0.0)
    many = spread(range(101))
    assert [many[k] for k in ("min", "p50", "p90", "p99", "max")] == [0, 50, 90, 99, 100]


def test_only_measured_records_inside_the_window_count() -> None:
    records = [record(0, phase="warm"), record(1, phase="prime"), record(2), record(3)]
    records[3].scheduled = 7.0
    assert metrics(Run(records=records))["requests"]["sent"] == 2
    assert metrics(Run(records=records), window=(0, 5))["requests"]["sent"] == 1
    assert metrics(Run())["requests"]["sent"] == 0
    assert metrics(Run(), Slo(ttft=1))["attainment"]["all"] is None


def test_groups_keep_their_order_and_add_up() -> None:
    run = Run(records=[record(0, group="b"), record(1, group="a"), failed(2, group="b")])
    groups = by_group(run)
    assert list(groups) == ["b", "a"]
    assert [g["requests"]["sent"] for g in groups.values()] == [2, 1]
    assert groups["b"]["requests"]["errors"] == 1


def test_rates_of_pools() -> None:
    run = Run(records=[record()], server={"pools": {"prefill": 2, "decode": 4}})
    found = metrics(run)
    assert found["per_device"] == {
        "prefill_input": pytest.approx(50 / 1.1),
        "prefill_computed_input": pytest.approx(30 / 1.1),
        "decode_output": pytest.approx(1 / 1.1),
    }
    run.server = {"pools": {"all": 8}}
    assert metrics(run)["per_device"]["all_total"] == pytest.approx(13 / 1.1)


def test_blocks_are_the_workloads() -> None:
    run = Run(records=[record(cached_tokens=64)], workload={"block": 32})
    assert metrics(run)["hit"]["block"] == pytest.approx(2 / 4)


def test_steady_window_leaves_out_start_and_drain() -> None:
    spans = [(0, 9), (1, 9), (2, 9), (9, 12), (9, 11), (9, 10)]
    run = Run(records=[record(i, sent=float(a), end=float(b)) for i, (a, b) in enumerate(spans)])
    window = steady_window(run)
    assert window is not None
    assert window[0] == 2
    assert window[1] in (9, 10)  # three ended and three began at 9
    assert steady_window(Run()) is None


def test_every_number_is_defined() -> None:
    found = metrics(Run(records=[record()]))
    names = [*found["latency"], *(f"hit_{k}" for k in found["hit"])]
    names += ["throughput", "per_device", "attainment", "goodput", "in_flight", "input", "output"]
    assert set(names) <= DEFINITIONS.keys()
