"""Counters the engine reports; monotonic totals unless said otherwise."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot. `running`, `waiting`, `kv_pages_used`, `kv_pages_cached` and `longest_step` are
    gauges.

    `prefix_queries` / `prefix_hits` count prompt tokens looked up / found at first scheduling.
    `kv_pages_used` are held by requests, `kv_pages_cached` are idle but reusable.
    `step_seconds` is device time, `host_seconds` the time of planning, launching and collecting.
    `graph_passes` / `eager_passes`: a step is one pass or two, and a part of a chunk that goes by
    layers is one more; through captured CUDA graphs, or kernel by kernel (on a CPU always).
    `longest_step` is what a step can take at most, in seconds, by the cost model as it is now.
    """

    running: int = 0
    waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_used: int = 0
    kv_pages_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    graph_passes: int = 0
    eager_passes: int = 0
    longest_step: float = 0.0
