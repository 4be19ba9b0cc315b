"""Offline use: `LLM(model).generate(prompts)`, in this process, no server."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from baton.config.options import EngineOptions
from baton.core.errors import ConfigError, RequestError, RequestFailed, Unavailable
from baton.core.request import FinishReason, Output
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats
from baton.core.step import Scores
from baton.engine.build import build_core, prepare, read_tokenizer
from baton.engine.calls import Prompt, batch, check_rest, conversation, per_prompt, to_score
from baton.engine.output import Answers, merge
from baton.engine.threads import Interrupts


class LLM:
    """A model ready to answer, with the same engine the server runs. Calls from several threads
    take turns.

    Args:
        model: folder, GGUF file, hub id or embedded name; or whole EngineOptions.
        options: any engine option by its flat name, e.g. `max_model_len=4096`,
            `tensor_parallel_size=2`, `num_kv_pages=512`; see `baton serve --help`. Files and
            folders may be path objects.

    Raises:
        ConfigError: contradictory or impossible options.
        ModelError: the model cannot be read; names file, tensor and expectation.
    """

    def __init__(self, model: str | PathLike[str] | EngineOptions, **options: Any) -> None:
        if not isinstance(model, EngineOptions):
            model = EngineOptions.of(model, **options)
        elif options:
            raise ConfigError(f"options beside whole EngineOptions: {', '.join(options)}")
        self.options = model
        prepared = prepare(self.options)
        self.tokenizer = read_tokenizer(prepared)
        self.core, self.fingerprint = build_core(prepared, self.tokenizer)
        self.config = self.core.config
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread whose turn it is
        self._ended = ""  # why it answers no more

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
            progress: called with (finished, total) whenever a prompt finishes. It can end the call
                by raising, but not make another one.

        Raises:
            RequestError: a prompt or option is not acceptable, or this is called by `progress`;
                nothing has run then.
            RequestFailed: a request failed while running.
            Unavailable: a rank died, now or before, or this LLM has been closed.
        """
        asked = batch(prompts)
        params = per_prompt(sampling, len(asked))
        check_rest(cache_salt, progress)
        pending = []
        for prompt, sample in zip(asked, params, strict=True):
            name, vocab = f"r{next(self._ids)}", self.config.model.vocab_size
            pending.append(Answers.of(name, prompt, sample, self.tokenizer, vocab))
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
        ids = self.tokenizer.chat(conversation(messages), **template_options)
        return self.generate(
            [ids], SamplingParams(max_tokens=None) if sampling is None else sampling
        )[0]

    def score(self, token_ids: Sequence[int], start: int = 0) -> torch.Tensor:
        """Log-probabilities float32 [len - 1 - start, vocab]: row i is the distribution after token
        `start + i`.

        Computed on the serving path: in chunks, over pages. Tokens before `start` may come from the
        prefix cache.
        """
        return self.score_all([(token_ids, start)])[0]

    def score_all(self, prompts: Sequence[tuple[Sequence[int], int]]) -> list[torch.Tensor]:
        """`score` of several `(token_ids, start)`, which share steps."""
        return [scores.logprobs for scores in self.examine(prompts)]

    def examine(self, prompts: Sequence[tuple[Sequence[int], int]]) -> list[Scores]:
        """`score_all`, with the guesses of the MTP module where it is loaded: `drafts[i]` is what
        it expects at `start + i + 2`, after the right tokens up to `start + i + 1`. The last guess
        follows a token that the engine chose, and means nothing."""
        asked = to_score(prompts)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        names = [f"r{next(self._ids)}" for _ in asked]
        pending = []
        for name, (ids, _) in zip(names, asked, strict=True):
            last = ids.pop()  # nothing is computed of it
            if not 0 <= last < self.config.model.vocab_size:
                raise RequestError(f"token id {last} is outside the vocabulary", param="token_ids")
            pending.append(Answers(name, ids, sampling, None))
        try:
            self._run(pending, scores=[start for _, start in asked])
            return [_whole(self.core.scores[name]) for name in names]
        finally:
            for name in names:
                self.core.scores.pop(name, None)

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self.core.stats()

    def close(self) -> None:
        """Free the device and end worker processes, once a call in another thread has ended.

        Raises:
            RequestError: it is called inside a call of the same thread, by its `progress`.
        """
        with self._turn("closed"):
            self._ended = self._ended or "this LLM has been closed"
            self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        pending: list[Answers],
        *,
        cache_salt: str = "",
        scores: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        # One call at a time; and a step that is cut in half cannot be gone on from.
        with self._turn("called"), Interrupts() as interrupts:
            if self._ended:
                raise Unavailable(self._ended)
            try:
                return self._answer(pending, cache_salt, scores, progress, interrupts)
            except Unavailable as error:
                self._ended = str(error)
                raise

    @contextlib.contextmanager
    def _turn(self, done: str) -> Iterator[None]:
        """Wait for the calls of other threads; one of this thread would be waited for in vain."""
        if self._holder == threading.get_ident():
            raise RequestError(
                f"an LLM cannot be {done} inside one of its calls (its progress function): do it "
                "when the call has returned, or raise an exception to end the call"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def _answer(
        self,
        pending: list[Answers],
        cache_salt: str,
        scores: Sequence[int],
        progress: Callable[[int, int], None] | None,
        interrupts: Interrupts,
    ) -> list[Output]:
        """Queue everything, step until every answer is complete, and merge the deltas."""
        owners: dict[str, int] = {}
        results: list[Output | None] = [None] * len(pending)
        finished = 0
        try:
            for index, answers in enumerate(pending):
                score = scores[index] if scores else -1
                self.core.add(answers.requests(cache_salt=cache_salt, score=score), limited=False)
                owners |= dict.fromkeys(answers.children, index)
            while owners:
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
        except Unavailable:
            raise  # the engine is gone, and with it all that it held
        except BaseException:
            self._drain(owners)
            raise
        self._drain(owners)
        return [output for output in results if output is not None]

    def _drain(self, owners: Iterable[str]) -> None:
        """Abort what still runs and commit the steps in flight."""
        for request_id in owners:
            self.core.abort(request_id)
        while self.core.has_work():
            self.core.step()

    def _forget(self, answers: Answers, owners: dict[str, int]) -> None:
        for request_id in answers.aborts:
            self.core.abort(request_id)
        answers.aborts.clear()
        running = set(answers.unfinished)
        for child in answers.children:
            if child not in running:
                owners.pop(child, None)


def _whole(parts: list[Scores]) -> Scores:
    """Of all chunks."""
    logprobs = torch.cat([part.logprobs for part in parts])
    if parts[0].drafts is None:
        return Scores(logprobs)
    return Scores(logprobs, torch.cat([part.drafts for part in parts]))
