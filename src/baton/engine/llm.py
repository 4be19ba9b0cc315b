"""Offline use: `LLM(model).generate(prompts)`, in this process, no server."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from baton.config.options import EngineOptions
from baton.core.errors import ConfigError, RequestError
from baton.core.request import Output, TokenOutput
from baton.core.sampling import SamplingParams
from baton.core.stats import EngineStats
from baton.core.step import Scores
from baton.engine.build import build_core, prepare, read_tokenizer
from baton.engine.calls import Prompt, batch, check_rest, conversation, per_prompt, to_score
from baton.engine.output import Answers
from baton.engine.shared import Call, SharedCore
from baton.engine.threads import Interrupts


class LLM:
    """A model ready to answer, with the same engine the server runs. Calls from several threads
    run together: they share its steps.

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
        self._shared = SharedCore(self.core)

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
            progress: called with (finished, total) whenever a prompt finishes, between two steps.
                It can end the call by raising, and make other calls, here or in other threads.

        Raises:
            RequestError: a prompt or option is not acceptable; nothing has run then.
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
        return self._run(pending, cache_salt=cache_salt, progress=progress).outputs()

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
        call = self._run(pending, scores=[start for _, start in asked])
        return [_whole(call.scores[name]) for name in names]

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self.core.stats()

    @contextlib.contextmanager
    def watched(self, on_step: Callable[[Sequence[TokenOutput]], None]) -> Iterator[None]:
        """Inside, `on_step` hears the outputs of each engine step when it is committed, of all
        calls: for measurements. It cannot call the `LLM`; what it raises, the call that made the
        step raises. Of several the innermost hears."""
        before, self._shared.on_step = self._shared.on_step, on_step
        try:
            yield
        finally:
            self._shared.on_step = before

    def close(self) -> None:
        """Free the device and end worker processes. Calls that still run, in other threads or
        because their `progress` closes, raise Unavailable."""
        with Interrupts():
            self._shared.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Answers],
        *,
        cache_salt: str = "",
        scores: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Call:
        """Answer prompts; the call is over and has everything then."""
        call = Call(prompts)
        with Interrupts() as interrupts:  # a step that is cut in half cannot be gone on from
            try:
                self._shared.start(call, cache_salt, scores)
                running = True
                while running:
                    interrupts.check()
                    self._shared.step(call)
                    running = bool(call.running)  # before the news, so that there are no later ones
                    for finished in call.news():
                        if progress is not None:
                            progress(finished, len(prompts))
            finally:
                self._shared.leave(call)
        return call


def _whole(parts: list[Scores]) -> Scores:
    """Of all chunks."""
    logprobs = torch.cat([part.logprobs for part in parts])
    if parts[0].drafts is None:
        return Scores(logprobs)
    return Scores(logprobs, torch.cat([part.drafts for part in parts]))
