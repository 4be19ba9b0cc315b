"""Offline use: `LLM(model).generate(prompts)`, in this process, no server."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, cast

import torch

from baton.config.options import EngineOptions
from baton.core.errors import QueueFull, RequestError, RequestFailed, Unavailable
from baton.core.request import FinishReason, Output
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats
from baton.engine.build import build_core, prepare, read_tokenizer
from baton.engine.output import Answers, fan_out, merge
from baton.engine.threads import Interrupts

Prompt = str | Sequence[int]


class LLM:
    """A model ready to answer, with the same engine the server runs. Calls from several threads
    take turns.

    Args:
        model: folder, GGUF file, hub id or embedded name.
        options: any engine option by its flat name, e.g. `max_model_len=4096`,
            `tensor_parallel_size=2`, `num_kv_pages=512`; see `baton serve --help`.

    Raises:
        ConfigError: contradictory or impossible options.
        ModelError: the model cannot be read; names file, tensor and expectation.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.options = EngineOptions.of(model, **options)
        prepared = prepare(self.options)
        self.tokenizer = read_tokenizer(prepared)
        self.core, self.fingerprint = build_core(prepared, self.tokenizer)
        self.config = self.core.config
        self._ids = itertools.count()
        self._ended = ""
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        cache_salt: str = "",
    ) -> list[Output]:
        """Answer every prompt (text or token ids); outputs are in the order of the prompts.

        Args:
            sampling: one for all, or one per prompt.
            progress: called with (finished, total) whenever a prompt finishes.

        Raises:
            RequestError: a prompt or option is not acceptable; nothing has run then.
            RequestFailed: a request failed while running.
        """
        batch = _as_batch(prompts)
        params = _per_prompt(sampling, len(batch))
        pending = []
        for prompt, sample in zip(batch, params, strict=True):
            sample.verify(self.config.model.vocab_size)
            if sample.stop and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer", param="stop")
            ids = self._encode(prompt)
            pending.append(Answers(f"r{next(self._ids)}", ids, sample, self.tokenizer))
        return self._run(pending, cache_salt=cache_salt, progress=progress)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        **template_options: Any,
    ) -> Output:
        """Answer one conversation through the model's chat template."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer", param="messages")
        ids = self.tokenizer.chat(list(messages), **template_options)
        return self.generate([ids], sampling or SamplingParams(max_tokens=None))[0]

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities float32 [len - 1, vocab]: row i is the distribution after token i.

        Computed on the serving path: in chunks, over pages.
        """
        ids = list(token_ids)
        if len(ids) < 2:
            raise RequestError("score needs at least two tokens", param="token_ids")
        name = f"r{next(self._ids)}"
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        answers = Answers(name, ids[:-1], sampling, None)
        self._run([answers], score=True)
        return torch.cat(self.core.scores.pop(name))

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self.core.stats()

    def close(self) -> None:
        """Free the device and end worker processes."""
        self._ended = self._ended or "this LLM has been closed"
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError("text prompts need a tokenizer; pass token ids", param="prompt")
        return self.tokenizer.encode(prompt)

    def _run(
        self,
        pending: list[Answers],
        *,
        cache_salt: str = "",
        score: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Feed the engine as its queue allows and step it until every answer is complete."""
        # one call at a time; and a step that is cut in half cannot be gone on from
        with self._lock, Interrupts() as interrupts:
            if self._ended:
                raise Unavailable(self._ended)
            return self._steps(pending, cache_salt, score, progress, interrupts)

    def _steps(
        self,
        pending: list[Answers],
        cache_salt: str,
        score: bool,
        progress: Callable[[int, int], None] | None,
        interrupts: Interrupts,
    ) -> list[Output]:
        owners: dict[str, int] = {}
        results: list[Output | None] = [None] * len(pending)
        waiting = iter(enumerate(pending))
        finished = 0
        try:
            upcoming = next(waiting, None)
            while upcoming is not None or owners:
                while upcoming is not None:
                    index, answers = upcoming
                    if not self._add(answers, cache_salt, score):
                        break
                    owners |= dict.fromkeys(answers.children, index)
                    upcoming = next(waiting, None)
                interrupts.check()
                for out in self.core.step():
                    index = owners.get(out.request_id, -1)
                    if index < 0:
                        continue
                    if out.finish_reason is FinishReason.ERROR:
                        raise RequestFailed(out.error or "request failed")
                    answers = pending[index]
                    delta = answers.push(out)
                    if delta is not None:
                        results[index] = merge(results[index], delta, answers.sampling)
                        finished += delta.finished
                        if delta.finished and progress is not None:
                            progress(finished, len(pending))
                    if out.finish_reason is not None or answers.aborts:
                        self._forget(answers, owners)
        except Unavailable as error:  # a rank died
            self._ended = str(error)
            raise
        finally:
            for request_id in owners:
                self.core.abort(request_id)
            while self.core.has_work() and not self._ended:
                self.core.step()
        return [output for output in results if output is not None]

    def _add(self, answers: Answers, cache_salt: str, score: bool) -> bool:
        """Queue a prompt; False when that must wait for others to be computed."""
        requests = fan_out(
            answers.request_id,
            answers.prompt,
            answers.sampling,
            priority=0,
            cache_salt=cache_salt,
            arrival=time.monotonic(),
            score=score,
        )
        try:
            self.core.add_all(requests)
        except QueueFull:
            if not self.core.has_work():
                raise
            return False
        return True

    def _forget(self, answers: Answers, owners: dict[str, int]) -> None:
        for request_id in answers.aborts:
            self.core.abort(request_id)
        answers.aborts.clear()
        running = set(answers.unfinished)
        for child in answers.children:
            if child not in running:
                owners.pop(child, None)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None:
        return [SamplingParams()] * count
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(f"{len(sampling)} sampling params for {count} prompts", param="sampling")
    return list(sampling)
