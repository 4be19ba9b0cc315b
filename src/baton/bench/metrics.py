"""From the records of a load run to its numbers: a pure function, so that any run can be summarised
again under other objectives.

`metrics(run, slo)` gives nested dicts of plain numbers, seconds and tokens:

    requests    sent ok errors timeouts cancelled, failures {reason: count}
    seconds     from the first scheduled send to the last end
    latency     {ttft tpot itl itl_token e2e queue: spread}
    tokens      input cached computed output, exact_input exact_output (False: not the server's)
    throughput  requests input computed_input output total, each per second
    per_device  the same tokens per second and device of a pool, where the run names pools
    hit         token block request mean_request ideal, each a share
    attainment  ttft tpot e2e all, each a share of the requests sent; None without that objective
    goodput     requests output_tokens per second, of requests that met all; None without objectives
    in_flight   mean and most requests on the way

A spread is `{n mean std min p50 p90 p95 p99 max too_few}`. `too_few` names the percentiles with
fewer than ten samples beyond them: there they say little more than the maximum does. A number that
cannot be known is None. DEFINITIONS says in words what each one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from baton.bench.record import Record, Run

PERCENTILES = (50, 90, 95, 99)
#: samples that must lie beyond a percentile before it is called known
BEYOND = 10
#: tokens of a block, for the hit rate by block, where the workload does not say
BLOCK = 16

Spread = dict[str, Any]
Metrics = dict[str, Any]

DEFINITIONS = {
    "ttft": "Time to first token: from the scheduled send to the first stream event with text.",
    "tpot": "Time per output token of one request: (last event - first event) / (output tokens - "
    "those of the first event, 1 where unknown); none with fewer than two events.",
    "itl": "Inter-token latency by chunk: gaps between stream events with text, all requests "
    "together.",
    "itl_token": "Inter-token latency by token: each gap divided by the tokens of the event that "
    "ends it, once for each of them; only requests whose events' token counts are known.",
    "e2e": "End to end: from the scheduled send to the end of the answer.",
    "queue": "Client queue: from the scheduled send to the send; the wait under a cap, connecting, "
    "and the client's own lag.",
    "latency": "Latencies are those of answered requests; failed ones count against attainment.",
    "input": "Logical input: prompt tokens of answered requests, cached ones included.",
    "computed": "Computed input: logical input less what the server reports as cached.",
    "output": "Generated tokens of answered requests as the server's usage counts them.",
    "throughput": "Requests answered, and their tokens, per second from the first scheduled send "
    "to the last end.",
    "per_device": "Input per second and prefill device, output per second and decode device, or "
    "both per device where they are shared.",
    "hit_token": "Cached prompt tokens / prompt tokens; a request without a word on it has none, "
    "where the server reports others.",
    "hit_block": "Whole blocks cached / blocks of the prompts, the last one partial.",
    "hit_request": "Share of requests with at least one cached block.",
    "hit_mean_request": "Mean over requests of cached / prompt tokens.",
    "hit_ideal": "What an endless prefix cache of the workload's blocks would have held / prompt "
    "tokens.",
    "attainment": "Requests answered within the objective / requests sent: errors, time-outs and "
    "cancelled ones are misses. An answer too short for a TPOT meets that objective.",
    "goodput": "Requests that met every objective, and their output tokens, per second.",
    "in_flight": "Requests sent and not over, averaged over the run's seconds; and the most.",
    "percentile": "Linear between order statistics; too few samples when fewer than ten lie "
    "beyond it.",
}


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives per request in seconds; None where there is none."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2e))


def measured(run: Run, window: tuple[float, float] | None = None) -> list[Record]:
    """Records that count: of the phase "measure", scheduled within `window` seconds of the run's
    clock (start included, end not) when one is given."""
    low, high = window or (float("-inf"), float("inf"))
    return [r for r in run.records if r.phase == "measure" and low <= r.scheduled < high]


def steady_window(run: Run, share: float = 0.9) -> tuple[float, float] | None:
    """The longest span in which at least `share` of the most requests in flight were on the way;
    None when there is no request. A closed loop's start and drain fall outside."""
    steps = _in_flight_steps(measured(run))
    most = max((count for _, count in steps), default=0)
    best, begin = None, None
    for at, count in steps:
        if count >= share * most:
            begin = at if begin is None else begin
        elif begin is not None:
            if best is None or at - begin > best[1] - best[0]:
                best = (begin, at)
            begin = None
    return best


def metrics(run: Run, slo: Slo | None = None, window: tuple[float, float] | None = None) -> Metrics:
    """All numbers of the measured records; the module says which. Percentiles need no minimum of
    records here, and a run without any has counts of 0 and None elsewhere."""
    records = measured(run, window)
    return _numbers(records, run, slo, _seconds(records))


def by_group(
    run: Run, slo: Slo | None = None, window: tuple[float, float] | None = None
) -> dict[str, Metrics]:
    """The numbers of each group's records, in the order of the workload's "groups", else of first
    appearance. Groups share one stream, so their rates are over the seconds of all and add up."""
    groups: dict[str, list[Record]] = {name: [] for name in run.workload.get("groups", ())}
    records = measured(run, window)
    for record in records:
        groups.setdefault(record.group, []).append(record)
    seconds = _seconds(records)
    return {name: _numbers(own, run, slo, seconds) for name, own in groups.items() if own}


def ttft(record: Record) -> float | None:
    """Seconds from scheduled send to first token; None when none came."""
    return record.arrivals[0] - record.scheduled if record.arrivals else None


def tpot(record: Record) -> float | None:
    """Mean seconds per output token after the first event; None with fewer than two events."""
    first = record.counts[0] if len(record.counts) == len(record.arrivals) > 0 else 1
    after = output_tokens(record) - first
    if after < 1 or len(record.arrivals) < 2:
        return None
    return (record.arrivals[-1] - record.arrivals[0]) / after


def e2e(record: Record) -> float:
    """Seconds from scheduled send to the end of the answer."""
    return record.end - record.scheduled


def output_tokens(record: Record) -> int:
    """Tokens generated: as the server says, else as its events say, else one for each event."""
    if record.output_tokens is not None:
        return record.output_tokens
    return sum(record.counts) if record.counts else len(record.arrivals)


def input_tokens(record: Record) -> int:
    """Prompt tokens: as the server counts them, else as asked."""
    return record.input_tokens if record.reported_input is None else record.reported_input


def meets(record: Record, slo: Slo) -> dict[str, bool]:
    """Whether the request met each objective that there is, and "all" of them."""
    done = record.status == "ok"
    first, per_token = ttft(record), tpot(record)
    met: dict[str, bool] = {}
    if slo.ttft is not None:
        met["ttft"] = done and first is not None and first <= slo.ttft
    if slo.tpot is not None:
        met["tpot"] = done and (per_token is None or per_token <= slo.tpot)
    if slo.e2e is not None:
        met["e2e"] = done and e2e(record) <= slo.e2e
    return {**met, "all": done and all(met.values())}


def spread(values: Iterable[float]) -> Spread:
    """Statistics of one kind of sample; everything but `n` is None without samples."""
    samples = np.fromiter(values, dtype=np.float64)
    n = len(samples)
    names = [f"p{p}" for p in PERCENTILES]
    if n == 0:
        keys = ("mean", "std", "min", *names, "max")
        return {"n": 0, **dict.fromkeys(keys), "too_few": names}
    points = np.percentile(samples, PERCENTILES)
    return {
        "n": n,
        "mean": float(samples.mean()),
        "std": float(samples.std(ddof=1)) if n > 1 else 0.0,
        "min": float(samples.min()),
        **{name: float(value) for name, value in zip(names, points, strict=True)},
        "max": float(samples.max()),
        # in whole numbers: 1000 samples are enough for p99, whatever 1 - 0.99 is in binary
        "too_few": [f"p{p}" for p in PERCENTILES if n * (100 - p) < 100 * BEYOND],
    }


def _numbers(records: Sequence[Record], run: Run, slo: Slo | None, seconds: float) -> Metrics:
    good = [r for r in records if r.status == "ok"]
    reports = any(r.cached_tokens is not None for r in run.records)
    tokens = _tokens(good, reports)
    throughput = _throughput(len(good), tokens, seconds)
    return {
        "requests": _requests(records),
        "seconds": seconds,
        "latency": _latency(good),
        "tokens": tokens,
        "throughput": throughput,
        "per_device": _per_device(throughput, run.server.get("pools") or {}),
        "hit": _hit(good, reports, int(run.workload.get("block") or BLOCK)),
        "attainment": _attainment(records, slo),
        "goodput": _goodput(records, slo, seconds),
        "in_flight": _in_flight(records, seconds),
    }


def _requests(records: Sequence[Record]) -> dict[str, Any]:
    status = Counter(r.status for r in records)
    failures = Counter(r.error or r.status for r in records if r.status != "ok")
    return {
        "sent": len(records),
        "ok": status["ok"],
        "errors": status["error"],
        "timeouts": status["timeout"],
        "cancelled": status["cancelled"],
        "failures": dict(failures.most_common()),
    }


def _seconds(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(r.end for r in records) - min(r.scheduled for r in records)


def _latency(good: Sequence[Record]) -> dict[str, Spread]:
    samples: dict[str, Iterable[float | None]] = {
        "ttft": (ttft(r) for r in good),
        "tpot": (tpot(r) for r in good),
        "itl": (gap for r in good for gap in _gaps(r)),
        "itl_token": (gap for r in good for gap in _token_gaps(r)),
        "e2e": (e2e(r) for r in good),
        "queue": (r.sent - r.scheduled for r in good),
    }
    return {k: spread(v for v in values if v is not None) for k, values in samples.items()}


def _gaps(record: Record) -> list[float]:
    pairs = zip(record.arrivals, record.arrivals[1:], strict=False)
    return [after - before for before, after in pairs]


def _token_gaps(record: Record) -> list[float]:
    """Gaps by token, for requests whose events' token counts are known."""
    if len(record.counts) == len(record.arrivals):
        pairs = zip(_gaps(record), record.counts[1:], strict=False)
        return [gap / count for gap, count in pairs for _ in range(count)]
    return _gaps(record) if record.output_tokens == len(record.arrivals) else []


def _tokens(good: Sequence[Record], reports: bool) -> dict[str, Any]:
    total = sum(input_tokens(r) for r in good)
    # some servers leave the field out when nothing was cached
    cached = sum(r.cached_tokens or 0 for r in good) if reports else None
    return {
        "input": total,
        "cached": cached,
        # what a silent server computed cannot be known
        "computed": None if cached is None else total - cached,
        "output": sum(output_tokens(r) for r in good),
        "exact_input": all(r.reported_input is not None for r in good),
        "exact_output": all(r.output_tokens is not None for r in good),
    }


def _throughput(done: int, tokens: dict[str, Any], seconds: float) -> dict[str, float | None]:
    amounts = {
        "requests": done,
        "input": tokens["input"],
        "computed_input": tokens["computed"],
        "output": tokens["output"],
        "total": tokens["input"] + tokens["output"],
    }
    return {k: _rate(amount, seconds) for k, amount in amounts.items()}


def _rate(amount: float | None, seconds: float) -> float | None:
    if amount is None:
        return None
    return amount / seconds if seconds > 0 else 0.0


def _per_device(rates: dict[str, float | None], pools: dict[str, int]) -> dict[str, float | None]:
    """`pools` counts devices: {"prefill": n, "decode": m}, or {"all": n} where they are shared."""
    shares = {"prefill": ("input", "computed_input"), "decode": ("output",)}
    everything = ("input", "computed_input", "output", "total")
    return {
        f"{pool}_{kind}": None if (rate := rates[kind]) is None else rate / devices
        for pool, devices in pools.items()
        for kind in shares.get(pool, everything)
    }


def _hit(good: Sequence[Record], reports: bool, block: int) -> dict[str, float | None]:
    pairs = [(r.cached_tokens or 0, n) for r in good if (n := input_tokens(r)) > 0]
    every = sum(n for _, n in pairs)
    ideal = sum(r.shared_tokens for r in good) / every if every else None
    if not pairs or not reports:
        names = ("token", "block", "request", "mean_request")
        return {**dict.fromkeys(names), "ideal": ideal}
    return {
        "token": sum(c for c, _ in pairs) / every,
        "block": sum(c // block for c, _ in pairs) / sum(-(-n // block) for _, n in pairs),
        "request": sum(c >= block for c, _ in pairs) / len(pairs),
        "mean_request": sum(c / n for c, n in pairs) / len(pairs),
        "ideal": ideal,
    }


def _attainment(records: Sequence[Record], slo: Slo | None) -> dict[str, float | None]:
    names = ("ttft", "tpot", "e2e", "all")
    if not slo or not records:
        return dict.fromkeys(names)
    met = [meets(r, slo) for r in records]
    return {
        name: sum(m[name] for m in met) / len(met) if name in met[0] else None for name in names
    }


def _goodput(records: Sequence[Record], slo: Slo | None, seconds: float) -> dict[str, float | None]:
    if not slo:
        return {"requests": None, "output_tokens": None}
    within = [r for r in records if meets(r, slo)["all"]]
    return {
        "requests": _rate(len(within), seconds),
        "output_tokens": _rate(sum(output_tokens(r) for r in within), seconds),
    }


def _in_flight(records: Sequence[Record], seconds: float) -> dict[str, float]:
    busy = sum(r.end - r.sent for r in records)
    most = max((count for _, count in _in_flight_steps(records)), default=0)
    return {"mean": busy / seconds if seconds > 0 else 0.0, "most": most}


def _in_flight_steps(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), in order of time."""
    # an end comes before a send of the same moment: a closed loop never exceeds its concurrency
    changes = sorted([(r.sent, 1) for r in records] + [(r.end, -1) for r in records])
    steps, count = [], 0
    for at, change in changes:
        count += change
        steps.append((at, count))
    return steps
