"""`baton bench engine`: start one engine in this process, time its points, say what it ran on."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton import __version__
from baton.bench import about
from baton.bench.offline.account import Bytes, Hardware, Work, decode, prefill
from baton.bench.offline.ceilings import hardware
from baton.bench.offline.kernels import Tracer
from baton.bench.offline.measure import FIRST, Stopwatch, Timed
from baton.bench.offline.points import DECODE_STEPS, REPEATED_TOKENS, Limits, Point, require_fit
from baton.bench.offline.routing import PROMPT, STEPS, count_experts
from baton.config.machine import measure_machine
from baton.config.options import EngineOptions
from baton.core.errors import RequestFailed

if TYPE_CHECKING:
    from baton.engine.llm import LLM

SCHEMA = 1
#: not in the document: paths of one machine, and what has a place of its own there
_LEFT_OUT = {"model", "decisions", "model_path", "tokenizer_path"}


@dataclass(frozen=True)
class Settings:
    """How to measure. `budget`: seconds since the process started after which no point begins.

    ceilings: `copy`, `matmul`, `attention` of `Hardware` where the user knows them.
    lenient: points that do not fit the engine are skipped instead of refused.
    traces: folder for profiler traces of decode points; None for none.
    commit: recorded where this code is not in its own checkout.
    """

    repeats: int = 3
    budget: float = 480.0
    ceilings: dict[str, float | None] = field(default_factory=dict)
    lenient: bool = False
    traces: Path | None = None
    commit: str | None = None


Document = dict[str, Any]
#: told after the start and after each point: the document so far, and a line about what is new
Report = Callable[[Document, str], None]


def measure(
    options: EngineOptions, points: Sequence[Point], settings: Settings, report: Report
) -> Document:
    """Time `points` in order on an engine with `options`; the document says everything.

    Raises:
        ConfigError: contradictory options, or a point that the engine cannot run.
        ModelError: the model cannot be read.
    """
    if not settings.lenient:
        seqs = options.scheduler.max_num_seqs
        require_fit(points, Limits(options.model.max_model_len, seqs))
    begun, cache = about.process_start(), kernel_cache()
    from baton.engine.llm import LLM

    with LLM(options) as llm:
        config = llm.config
        limits = Limits(
            config.max_model_len, config.max_num_seqs, config.num_pages, config.page_size
        )
        if not settings.lenient:
            require_fit(points, limits)
        ready = time.monotonic() - begun
        watch = Stopwatch(llm)
        first = watch.first_request() - begun
        session = _Session(watch, settings, _describe(llm, settings))
        session.document["start"] = {
            "first_token_s": first,
            "ready_s": ready,
            "kernel_cache": cache if config.device == "cuda" else None,
        }
        report(session.document, f"started: first token {first:.1f} s after the process began")
        for point in points:
            why = point.misfit(limits)
            if not why and time.monotonic() - begun > settings.budget:
                why = f"the budget of {settings.budget:g} s was spent"
            report(session.document, session.skip(point, why) if why else session.run(point))
    return session.document


class _Session:
    """Points timed so far, as the document that is written."""

    def __init__(self, watch: Stopwatch, settings: Settings, document: Document) -> None:
        self.watch, self.settings, self.document = watch, settings, document
        config = watch.llm.config
        self._model, self._sizes = config.model, Bytes.of(config.dtype, config.kv_dtype)
        ceilings = document["hardware"]
        self._hardware = Hardware(
            ceilings["name"], ceilings["copy"], ceilings["matmul"], ceilings["attention"]
        ).times(config.tensor_parallel_size)

    def skip(self, point: Point, why: str) -> str:
        """Record that a point was not run."""
        self.document["skipped"].append({"point": point.name, "reason": why})
        return f"{point.name}: skipped, {why}"

    def run(self, point: Point) -> str:
        """Time a point and record it; a request that failed is recorded too."""
        try:
            row = self._decode(point) if point.decode_steps else self._ttft(point)
        except RequestFailed as error:
            self.document["failed"].append({"point": point.name, "reason": str(error)})
            return f"{point.name}: failed, {error}"
        finally:
            self.document["memory"] = memory(self.watch.llm.config.device)
            self.document["passes"] = passes(self.watch.llm)
        roof = row["roofline"]
        times = f"{row['ms']:,.2f} ms, limit {roof['limit_ms']:,.2f} ms"
        return f"{point.name}: {times} ({roof['share']:.0%})"

    def _ttft(self, point: Point) -> Document:
        timed = self.watch.ttft(point, point.repeats(self.settings.repeats))
        work = prefill(self._model, point.context, self._sizes)
        row = {"prompt": point.context, **_timed(timed), "roofline": self._roofline(work, timed.ms)}
        self.document["ttft"].append(row)
        return row

    def _decode(self, point: Point) -> Document:
        timed = self.watch.decode(point, point.repeats(self.settings.repeats))
        routing = count_experts(self.watch.llm, point)
        counted = None if routing is None else routing.mean
        middle = point.context + point.decode_steps / 2
        work = decode(self._model, point.batch, middle, self._sizes, counted)
        row = {
            "batch": point.batch,
            "context": point.context,
            **_timed(timed),
            "experts": {
                "source": "expected" if counted is None else "counted",
                "mean": work.experts,
                "per_layer": None if routing is None else routing.per_layer,
            },
            "roofline": self._roofline(work, timed.ms),
            "profile": self._trace(point),
        }
        self.document["decode"].append(row)
        return row

    def _roofline(self, work: Work, ms: float) -> Document:
        limit = work.limit(self._hardware) * 1e3
        return {
            **asdict(work),
            "memory_ms": work.memory_seconds(self._hardware) * 1e3,
            "compute_ms": work.compute_seconds(self._hardware) * 1e3,
            "limit_ms": limit,
            "share": limit / ms if ms > 0 else 0.0,
        }

    def _trace(self, point: Point) -> Document | None:
        folder = self.settings.traces
        if folder is None or self.watch.llm.config.device != "cuda":
            return None
        tracer = Tracer(folder / f"{point.name.replace(' ', '-')}.json")
        self.watch.watch(point, tracer)
        found = tracer.activity
        if found is None:
            return None
        shares = {"idle_share": found.idle_share, "waiting_share": found.waiting_share}
        return {**asdict(found), **shares}


def _timed(timed: Timed) -> Document:
    return {
        "ms": timed.ms,
        "samples_ms": list(timed.samples),
        "repeats": len(timed.samples),
        "warm": True,
        "steps": timed.steps,
        "host_ms": timed.host_ms,
        "full_batch_ms": None if timed.full_batch is None else timed.full_batch[0],
        "full_batch_p90_ms": None if timed.full_batch is None else timed.full_batch[1],
    }


def _describe(llm: LLM, settings: Settings) -> Document:
    """Everything but the figures."""
    config, machine = llm.config, measure_machine(llm.config.device)
    found, source = hardware(machine, config.dtype, **settings.ceilings)
    return {
        "kind": "baton bench engine",
        "schema": SCHEMA,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": settings.commit or about.commit(),
        "baton": __version__,
        "versions": about.versions(),
        "device": {
            "type": config.device,
            "name": machine.device_name,
            "ranks": config.tensor_parallel_size,
            "cores": machine.cores,
        },
        "hardware": {**asdict(found), "source": source},
        "model": {
            "name": Path(llm.options.model.model).name,
            "family": config.model.family,
            "layers": config.model.num_layers,
        },
        "backends": backends(llm),
        "config": {k: v for k, v in vars(config).items() if k not in _LEFT_OUT},
        "decisions": [asdict(decision) for decision in config.decisions],
        "fingerprint": {"digest": llm.fingerprint.digest, **llm.fingerprint.to_dict()},
        "method": {
            "sampling": "temperature 1, end of text ignored",
            "prompts": "random token ids",
            "prefix_cache": config.prefix_caching,
            "first_request": list(FIRST),
            "warm_up": "each shape once before it is timed",
            "figure": "median of the repeats",
            "decode_steps": DECODE_STEPS,
            "repeats": settings.repeats,
            "once_above_tokens": REPEATED_TOKENS,
            "experts_counted_in": {"prompt_at_most": PROMPT, "steps": STEPS},
            "budget_s": settings.budget,
        },
        "memory": memory(config.device),
        "passes": passes(llm),
        "ttft": [],
        "decode": [],
        "skipped": [],
        "failed": [],
    }


def backends(llm: LLM) -> dict[str, str]:
    """What the engine runs prefill attention, decode attention and experts on."""
    from baton.attention.backend import ATTENTION
    from baton.layers.moe import Experts
    from baton.ops.moe import backend

    model: Any = llm.core.executor.runner.model
    kinds = {ATTENTION.get(name): name for name in ATTENTION.names()}
    found = {half: kinds[type(getattr(model.attention, half))] for half in ("prefill", "decode")}
    experts = next((m for m in model.modules() if isinstance(m, Experts)), None)
    found["moe"] = "none" if experts is None else backend(experts.gate_up, experts.down)
    return found


def passes(llm: LLM) -> dict[str, int]:
    """Of all steps so far: through CUDA graphs, and kernel by kernel."""
    stats = llm.stats()
    return {"graph": stats.graph_passes, "eager": stats.eager_passes}


def memory(device: str) -> dict[str, int | None]:
    """Most bytes so far: allocated on this process's device, and resident on the host."""
    peak = None
    if device == "cuda":
        import torch

        peak = torch.cuda.max_memory_allocated()
    return {"device_peak_bytes": peak, "host_peak_bytes": about.host_peak()}


def kernel_cache() -> str | None:
    """ "warm" when compiled Triton kernels of earlier runs are here, "cold" when there are none;
    None without Triton."""
    with suppress(ImportError):
        folder = Path(importlib.import_module("triton").knobs.cache.dir)
        return "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"
    return None
