"""Prometheus metrics under names that vLLM users know, with the prefix `baton:`.

Latencies are measured here, from streams; totals and gauges are the engine's own, asked for at
each scrape. Everything runs on the event loop, so the hot path takes no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from baton.core.errors import BatonError
from baton.core.request import Output
from baton.core.stats import EngineStats
from baton.server.protocol import EngineClient

_FIRST: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST += (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
_TOKEN += (0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

_COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of accepted requests"),
    "computed_tokens": ("computed_tokens", "Tokens run through the model"),
    "generation_tokens": ("generation_tokens", "Tokens generated"),
    "num_preemptions": ("preemptions", "Times a running request lost its pages"),
    "engine_steps": ("steps", "Steps run"),
    "engine_step_seconds": ("step_seconds", "Device time of steps"),
    "engine_host_seconds": ("host_seconds", "Host time of planning, launching and collecting"),
    "engine_graph_passes": ("graph_passes", "Passes of steps through CUDA graphs"),
    "engine_eager_passes": ("eager_passes", "Passes launched kernel by kernel, on a CPU all"),
    "engine_finished": ("finished", "Sequences that ended by themselves"),
    "engine_aborted": ("aborted", "Sequences that their callers gave up"),
    "engine_failed": ("failed", "Sequences that failed"),
    "engine_rejected": ("rejected", "Sequences that were refused"),
}
_GAUGES = {
    "num_requests_running": ("running", "Requests running"),
    "num_requests_waiting": ("waiting", "Requests waiting"),
    "engine_longest_step_seconds": (
        "longest_step",
        "What a step can take at most, by its cost model",
    ),
    "kv_pages_cached": ("kv_pages_cached", "Idle KV pages that prefixes can be found in"),
}


class Histogram:
    """Counts per bucket; cheap enough for every token of thousands of streams."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self, model: str) -> Metric:
        """The histogram as Prometheus sees it."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(float, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        family = HistogramMetricFamily(f"baton:{self.name}", self.help, labels=["model_name"])
        family.add_metric([model], buckets, self.sum)
        return family


class Metrics(Collector):
    """Everything `/metrics` reports, in a registry of its own."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds", "Between tokens of one answer", _TOKEN
        )
        self.per_token = Histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", _TOKEN
        )
        self.whole = Histogram("e2e_request_latency_seconds", "From arrival to the end", _WHOLE)
        self.queue = Histogram("request_queue_time_seconds", "Wait before the first step", _WHOLE)
        self.finished: Counter[str] = Counter()
        self.http: Counter[tuple[str, str]] = Counter()
        self._engine: EngineClient | None = None
        self._model = ""
        self._stats = EngineStats()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def attach(self, engine: EngineClient, model: str) -> None:
        """Report this engine's counters under the label `model`."""
        self._engine, self._model = engine, model

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Body and content type; an engine that does not answer leaves its last numbers."""
        if self._engine is not None:
            with contextlib.suppress(BatonError, TimeoutError):
                self._stats = await asyncio.wait_for(self._engine.stats(), 2.0)
        try:
            encoder, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # a version that is none
            encoder, content_type = choose_encoder("")
        return encoder(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        label, stats = [self._model], self._stats
        for name, (field, help) in _COUNTERS.items():
            counter = CounterMetricFamily(f"baton:{name}", help, labels=["model_name"])
            counter.add_metric(label, getattr(stats, field))
            yield counter
        for name, (field, help) in _GAUGES.items():
            yield self._gauge(name, help, getattr(stats, field))
        used = stats.kv_pages_used / max(1, stats.kv_pages_total)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages held, 1 is all", used)
        up = float(self._engine is not None and self._engine.state == "ready")
        yield self._gauge("engine_ready", "1 when the engine takes requests", up)
        yield self._finished()
        yield self._http()
        for histogram in (
            self.first_token,
            self.between_tokens,
            self.per_token,
            self.whole,
            self.queue,
        ):
            yield histogram.family(self._model)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"baton:{name}", help, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge

    def _finished(self) -> Metric:
        family = CounterMetricFamily(
            "baton:request_success",
            "Answers by how they ended",
            labels=["model_name", "finished_reason"],
        )
        for reason in sorted({"stop", "length", "abort", "error"} | self.finished.keys()):
            family.add_metric([self._model, reason], self.finished[reason])
        return family

    def _http(self) -> Metric:
        family = CounterMetricFamily(
            "baton:http_requests", "HTTP requests", labels=["path", "status"]
        )
        for (path, status), count in sorted(self.http.items()):
            family.add_metric([path, status], count)
        return family


class StreamMeter:
    """Measures one stream: first token, gaps, end. `arrival` is `time.monotonic()`."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics, self._arrival = metrics, arrival
        self._marks: dict[int, list[Any]] = {}  # index -> [first, last, tokens]

    def update(self, output: Output) -> None:
        """Take one delta."""
        metrics, now = self._metrics, time.monotonic()
        for completion in output.completions:
            count = len(completion.token_ids)
            mark = self._marks.get(completion.index)
            if count and mark is None:
                if not self._marks:
                    metrics.first_token.observe(now - self._arrival)
                mark = self._marks[completion.index] = [now, now, count]
                if count > 1:  # they came at once
                    metrics.between_tokens.observe(0.0, count - 1)
            elif count and mark is not None:
                metrics.between_tokens.observe((now - mark[1]) / count, count)
                mark[1] = now
                mark[2] += count
            if completion.finish_reason is not None:
                metrics.finished[completion.finish_reason.value] += 1
                if mark is not None and mark[2] > 1:
                    metrics.per_token.observe((mark[1] - mark[0]) / (mark[2] - 1))
        if output.finished:
            metrics.whole.observe(now - self._arrival)
            if output.timing is not None and output.timing.scheduled:
                metrics.queue.observe(output.timing.scheduled - output.timing.arrival)
