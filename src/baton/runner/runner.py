"""Runs step plans on one device. `launch` returns at once; `collect` waits for that step only.

On CUDA the launch enqueues kernels and the device's stream is the queue. On the CPU one device
thread plays the stream, so the host plans the next step while this one computes there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from baton.config.engine import EngineConfig
from baton.core import env
from baton.core.errors import Unavailable
from baton.core.forward import ForwardBatch, ForwardContext, Model
from baton.core.kv import KVView
from baton.core.log import get_logger
from baton.core.request import PositionLogprobs
from baton.core.sampling import SamplingParams
from baton.core.step import Admit, Row, RowResult, Scores, StepPlan, StepResult
from baton.runner.graphs import StepGraphs, batch_buckets
from baton.runner.inputs import StepInputs, build_inputs, following
from baton.runner.probes import Probe, chunks, mixed
from baton.runner.prompt import prompt_rows
from baton.runner.sampled import Sampled
from baton.runner.sampler import Sampler
from baton.runner.slots import Slots
from baton.runner.stopwatch import Stopwatch
from baton.runner.under_way import ChunkLost, UnderWay

T = TypeVar("T")
log = get_logger("runner")


@dataclass
class _Launched:
    """Everything a step left on the device, kept alive until it is collected."""

    plan: StepPlan
    watch: Stopwatch
    sampled: list[tuple[list[int], Sampled]] = field(default_factory=list)
    prompt: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    admitted: bool = False


@contextmanager
def _vital(plan: StepPlan) -> Iterator[None]:
    """Around what must not fail: no later step could trust what is on the device after that."""
    try:
        yield
    except Exception as error:
        raise Unavailable(
            f"step {plan.step} left the device out of step with the host: "
            f"{type(error).__name__}: {error}"
        ) from error


class Ticket:
    """The future of one step; read exactly once."""

    def __init__(self, future: Future[_Launched]) -> None:
        self._future: Future[_Launched] | None = future

    def launched(self, timeout: float | None = None) -> _Launched:
        """The step's outputs, which a GPU may still be computing. Raises what went wrong in it, and
        TimeoutError after `timeout` seconds; then ask again."""
        if self._future is None:
            raise AssertionError("a step's result was collected twice")
        return self._future.result(timeout)

    def wait(self, timeout: float | None = None) -> tuple[_Launched, float]:
        """As `launched`, once the device is through with this step (and not with any later one),
        and how many seconds it took."""
        launched = self.launched(timeout)
        seconds = launched.watch.seconds(timeout)
        self._future = None
        return launched, seconds


class Runner:
    """Owns one rank's model, KV pages, slots and sampler.

    `graph_passes` and `eager_passes` count passes of steps through CUDA graphs, and those that were
    launched kernel by kernel, parts of a chunk that goes by layers among them.

    Args:
        views: one KVView per layer, each of `config.num_pages + 1` pages: the last one is scrap.
    """

    def __init__(self, config: EngineConfig, model: Model, views: Sequence[KVView]) -> None:
        self.config = config
        self.model = model
        self.views = views
        self.device = torch.device(config.device)
        debug = env.DEBUG.get()
        max_pages = -(-config.max_model_len // config.page_size)
        self.slots = Slots(
            config.max_num_seqs, config.num_pages, max_pages, self.device, debug=debug
        )
        self.sampler = Sampler(config.max_num_seqs, config.model.vocab_size, self.device)
        self.graphs: StepGraphs | None = None
        self.graph_passes = self.eager_passes = 0
        self._under_way = UnderWay(model, views, self.slots, config.page_size)
        self._thread: ThreadPoolExecutor | None = None
        if self.device.type == "cpu":
            # The thread count of a parallel region belongs to the thread that opens it.
            self._thread = ThreadPoolExecutor(
                1, "baton-device", torch.set_num_threads, (config.threads,)
            )

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run steps of every kind that can come, and of no other."""
        model = self.model
        config = self.config
        most = min(config.max_num_batched_tokens, config.max_model_len)
        if self._graphed(model):
            self._step_graphs(model).run_once()
        else:
            for size in batch_buckets(config.max_num_seqs):
                self._synthetic(Probe(size, 1, 0), model)
        for chunk in chunks(most):
            for context in (0, config.page_size):
                if chunk + context <= config.max_model_len:
                    self._synthetic(Probe(1, chunk, context), model)
        if most >= config.page_size and config.max_num_seqs > 2:
            self._pass(*mixed(config.page_size, self.device), model)
        self.sampler.admit(Admit(0, SamplingParams(), 0, 1, 0, [], []))
        self.sampler.sample(torch.zeros(1, self.sampler.vocab_size, device=self.device), [0])
        self.sampler.release(0)

    def _graphed(self, model: Model) -> bool:
        """Whether its steps are those of `StepGraphs`. A step with an MTP module ends with guesses,
        which no graph holds, and debug's checks read the device."""
        if self.device.type != "cuda" or self.slots.debug:
            return False
        return model.graphable and not model.drafts

    def capture(self) -> None:
        """Capture decodes and short prompts as CUDA graphs."""
        if not self._graphed(self.model):
            return
        self.graphs = self._step_graphs(self.model)
        if not self.config.enforce_eager:
            self.graphs.capture(self._step_graphs(self.model.brief()))

    def _step_graphs(self, model: Model) -> StepGraphs:
        config = self.config
        return StepGraphs(
            model,
            self.views,
            self.slots,
            self.sampler,
            config.page_size,
            config.max_num_seqs,
            min(config.max_num_batched_tokens, config.max_model_len),
        )

    def launch(self, plan: StepPlan) -> Ticket:
        """Queue one step behind those launched before."""
        return Ticket(self._submit(lambda: self._run(plan)))

    def collect(self, ticket: Ticket, timeout: float | None = None) -> StepResult:
        """Results of a launched step, in the order of its rows.

        Raises:
            TimeoutError: after `timeout` seconds; ask again.
            Unavailable: no later step can run either.
            Exception: what failed in the step; steps behind it can run.
        """
        launched, seconds = ticket.wait(timeout)
        results = [RowResult() for _ in launched.plan.rows]
        for rows, sampled in launched.sampled:
            for row, result in zip(rows, sampled.to_host(), strict=True):
                results[row] = result
        for row, error in launched.errors.items():
            results[row].error = error
        for row, logprobs in launched.prompt.items():
            results[row].prompt_logprobs = logprobs
        return StepResult(launched.plan.step, results, seconds, dict(launched.scores))

    def poison_pages(self, pages: list[int]) -> None:
        """Debug: fill freed pages with NaN, in device order, so that a stale read shows."""
        self._submit(lambda: self._poison(pages))

    def probe(self, probe: Probe) -> float:
        """Device seconds of one synthetic step (see `probes`); nothing of it is kept."""
        return self._submit(lambda: self._probe(probe)).result()

    def close(self) -> None:
        """Finish what was launched and end the device thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(work)
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> _Launched:
        with _vital(plan):
            launched = _Launched(plan, Stopwatch(self.device))
            for slot in plan.release:
                self.sampler.release(slot)
                self._under_way.release(slot)
            self.slots.apply(plan)
        try:
            self._passes(launched)
        except Exception:
            self._under_way.drop()
            with _vital(plan):
                self.slots.void(plan.rows)
            raise
        finally:
            self._admit(launched)
        launched.watch.stop()
        return launched

    def _admit(self, launched: _Launched) -> None:
        """Tell the sampler of new requests, once. It needs them when it samples, and the copies
        that this takes would hold up the first pass."""
        if not launched.admitted:
            launched.admitted = True
            with _vital(launched.plan):
                for admit in launched.plan.admit:
                    self.sampler.admit(admit)

    def _passes(self, launched: _Launched) -> None:
        """The rows in as few passes as graphs allow, then a chunk that goes by layers."""
        rows = launched.plan.rows
        whole = [i for i, row in enumerate(rows) if row.layers is None]
        passes = [whole] if self.graphs is None else self.graphs.passes(whole, rows)
        for indices in filter(None, passes):
            if not self._replay(launched, indices):
                self.eager_passes += 1
                inputs = build_inputs([rows[i] for i in indices], self.slots, self.config.page_size)
                context = self.model.plan(inputs.batch, self.views)
                hidden = self.model.forward(inputs.ids, context)
                self._finish(launched, indices, inputs, context, hidden)
        for i, row in enumerate(rows):
            if row.layers is not None:
                self.eager_passes += 1
                self._advance_chunk(launched, i, row, row.layers)

    def _replay(self, launched: _Launched, indices: list[int]) -> bool:
        """A pass through a captured graph; False when it has to run eagerly."""
        rows = [launched.plan.rows[i] for i in indices]
        found = None if self.graphs is None else self.graphs.run(rows)
        if self.graphs is None or found is None:
            return False
        self.graph_passes += self.graphs.captured
        self.eager_passes += not self.graphs.captured
        if found.chosen is None:
            self._admit(launched)
        if all(row.sample for row in rows):
            slots, counted = [row.slot for row in rows], found.chosen is not None
            sampled = None if found.chosen is None else self.sampler.take(found.chosen, slots)
            if sampled is None:
                sampled = self.sampler.sample(found.logits, slots, counted=counted)
                self.slots.write(self.sampler.device_slots(slots), sampled.tokens)
            launched.sampled.append((indices, sampled))
        return True

    def _advance_chunk(
        self, launched: _Launched, index: int, row: Row, layers: tuple[int, int]
    ) -> None:
        """A chunk's part of this step; if it goes wrong, the other rows have run already."""
        try:
            done = self._under_way.advance(row, *layers)
            if done is not None:
                self._finish(launched, [index], *done)
            return
        except ChunkLost as error:
            problem = str(error)
        except Exception as error:
            if self.config.tensor_parallel_size > 1:
                raise  # the other ranks may wait for this one inside a collective
            log.exception("step %d: a chunk failed in layers %d to %d", launched.plan.step, *layers)
            self._under_way.drop()
            problem = f"the step that ran this request failed: {type(error).__name__}: {error}"
        with _vital(launched.plan):
            self.slots.void([row])
        launched.errors[index] = problem

    def _finish(
        self,
        launched: _Launched,
        indices: list[int],
        inputs: StepInputs,
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> None:
        """What follows a pass: lengths move on, samples, log-probabilities of known tokens."""
        rows = [launched.plan.rows[i] for i in indices]
        self.slots.computed[inputs.slots] += inputs.lengths
        self._admit(launched)
        tokens = None
        if inputs.sample_rows:
            logits = self.model.logits(hidden[inputs.sample_index]).float()
            slots = [rows[i].slot for i in inputs.sample_rows]
            sampled = self.sampler.sample(logits, slots)
            self.slots.write(self.sampler.device_slots(slots), sampled.tokens)
            launched.sampled.append(([indices[i] for i in inputs.sample_rows], sampled))
            tokens = sampled.tokens
        ahead = None
        if self.model.drafts:  # in every pass: the module's KV must be there for later ones
            ahead = self.model.draft(hidden, following(rows, inputs, tokens), context)
        prompt, scores = prompt_rows(rows, hidden, ahead, self.model.logits)
        launched.prompt.update({indices[i]: found for i, found in prompt.items()})
        launched.scores.update({indices[i]: found for i, found in scores.items()})

    @torch.inference_mode()
    def _probe(self, probe: Probe) -> float:
        rows = self._rehearsal(probe)
        replayed = bool(rows) and self.graphs is not None and self.graphs.run(rows) is not None
        watch = Stopwatch(self.device)
        if replayed and self.graphs is not None:
            self.graphs.run(rows)  # the first replay also uploaded the graph
        else:
            self._synthetic(probe, self.model)
        watch.stop()
        self.slots.vacate(len(rows))
        return watch.seconds()

    def _rehearsal(self, probe: Probe) -> list[Row]:
        """Rows that a graph runs as `probe`, in slots filled for it; none if no graph would."""
        if self.graphs is None or not (probe.chunk == 1 or (probe.seqs == 1 and not probe.context)):
            return []
        width = -(-(probe.context + probe.chunk + 2) // self.config.page_size)
        if width > self.slots.pages.shape[1]:
            return []
        self.slots.occupy(probe.seqs, probe.context, width, self.config.num_pages)
        vocab = self.config.model.vocab_size
        ids = np.arange(probe.chunk if probe.chunk > 1 else 0, dtype=np.int64) * 7 % vocab
        tokens = ids.tobytes()
        return [
            Row(slot, probe.context, probe.chunk, tokens, [], True) for slot in range(probe.seqs)
        ]

    def _synthetic(self, probe: Probe, model: Model) -> None:
        config = self.config
        ids, batch = probe.batch(
            config.page_size, config.num_pages, config.model.vocab_size, self.device
        )
        model.logits(self._pass(ids, batch, model)[-len(batch.query_lens) :])

    def _pass(self, ids: torch.Tensor, batch: ForwardBatch, model: Model) -> torch.Tensor:
        """Hidden states of a synthetic step, with all that goes through layers."""
        context = model.plan(batch, self.views)
        hidden = model.forward(ids, context)
        if model.drafts:
            model.draft(hidden, ids, context)
        return hidden

    @torch.inference_mode()
    def _poison(self, pages: list[int]) -> None:
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for view in self.views:
            view.poison(index)
