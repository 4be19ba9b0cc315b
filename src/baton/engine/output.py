"""From engine tokens to what a caller reads: text, stop strings, `n` answers to one prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.core.errors import RequestError
from baton.core.request import Completion, FinishReason, Output, Request, TokenOutput
from baton.core.sampling import SamplingParams
from baton.models.detokenizer import Detokenizer
from baton.models.tokenizer import Tokenizer


class StopText:
    """Holds text back just long enough that no part of a stop string is ever shown."""

    def __init__(self, stops: list[str], *, include: bool) -> None:
        self.stops = stops
        self.include = include
        self._held = ""
        self._hold = max((len(stop) for stop in stops), default=1) - 1

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was found or None)."""
        if not self.stops or not active:
            return self.flush() + text, None
        self._held += text
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            shown = self._held[: at + len(stop) if self.include else at]
            self._held = ""
            return shown, stop
        cut = len(self._held) - self._overlap()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """What was still held when the answer ended for another reason."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        for size in range(min(self._hold, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self.stops):
                return size
        return 0


@dataclass
class _Answer:
    """One of the `n` sequences."""

    index: int
    request_id: str
    detokenizer: Detokenizer | None
    stop: StopText
    tokens: int = 0
    done: bool = False


@dataclass
class Answers:
    """Turns the engine's outputs for one prompt into Output deltas.

    engine_id: what the engine calls it, the request id unless given. The engine may still speak of
        a request that was aborted, so a name that comes again needs another one.
    aborts: engine requests that ended here (stop string) and must be aborted there.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    tokenizer: Tokenizer | None
    engine_id: str = ""
    aborts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        n, name = self.sampling.n, self.engine_id or self.request_id
        for i in range(n):
            child = name if n == 1 else f"{name}#{i}"
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = self.tokenizer.stream(self.sampling.skip_special_tokens)
            stop = StopText(self.sampling.stop, include=self.sampling.include_stop_str_in_output)
            self._answers[child] = _Answer(i, child, detokenizer, stop)
        self._cached = 0

    @staticmethod
    def of(
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        engine_id: str = "",
    ) -> Answers:
        """Answers to a prompt that is still to be encoded, and sampling still to be checked.

        Raises:
            RequestError: an option is out of range, or needs a tokenizer and there is none.
        """
        sampling.verify(vocab_size)
        if tokenizer is None and sampling.stop:
            raise RequestError("stop strings need a tokenizer", param="stop")
        if not isinstance(prompt, str):
            return Answers(request_id, list(prompt), sampling, tokenizer, engine_id)
        if tokenizer is None:
            raise RequestError("text prompts need a tokenizer; pass token ids", param="prompt")
        return Answers(request_id, tokenizer.encode(prompt), sampling, tokenizer, engine_id)

    def requests(
        self, *, priority: int = 0, cache_salt: str = "", score: int = -1
    ) -> list[Request]:
        """An engine request for each answer, arriving now; a seed makes each of them differ but
        repeatable."""
        arrival, made = time.monotonic(), []
        for answer in self._answers.values():
            child = self.sampling
            if child.n > 1:
                seed = None if child.seed is None else _shift(child.seed, answer.index)
                child = msgspec.structs.replace(child, n=1, seed=seed)
            made.append(
                Request(
                    request_id=answer.request_id,
                    prompt=self.prompt,
                    sampling=child,
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival=arrival,
                    score=score,
                )
            )
        return made

    @property
    def children(self) -> list[str]:
        """Engine request ids of all answers."""
        return list(self._answers)

    @property
    def unfinished(self) -> list[str]:
        """Engine request ids of answers that still run."""
        return [a.request_id for a in self._answers.values() if not a.done]

    def push(self, out: TokenOutput) -> Output | None:
        """The delta this engine output means to the caller; None if there is nothing new."""
        answer = self._answers[out.request_id]
        if answer.done:
            return None
        self._cached = max(self._cached, out.cached_tokens)
        text, reason, stop_reason = self._text(answer, out)
        answer.tokens += len(out.token_ids)
        answer.done = reason is not None
        completion = Completion(
            index=answer.index,
            text=text,
            token_ids=out.token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=out.logprobs,
        )
        return Output(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            completions=[completion],
            finished=not self.unfinished,
            cached_tokens=self._cached,
            prompt_logprobs=out.prompt_logprobs,
            timing=out.timing,
        )

    def _text(
        self, answer: _Answer, out: TokenOutput
    ) -> tuple[str, FinishReason | None, int | str | None]:
        """(new text, finish reason, stop reason) after one engine output."""
        reason, stop_reason = out.finish_reason, out.stop_reason
        if answer.detokenizer is None:
            return "", reason, stop_reason
        visible = out.token_ids
        if reason is FinishReason.STOP and not self.sampling.include_stop_str_in_output:
            visible = visible[:-1]  # the engine stops on a token, which is not part of the text
        active = answer.tokens + len(out.token_ids) > self.sampling.min_tokens
        text, found = answer.stop.push(answer.detokenizer.push(visible), active=active)
        if found is not None:
            if reason is None:
                self.aborts.append(answer.request_id)
            return text, FinishReason.STOP, found
        if reason is not None:
            tail, found = answer.stop.push(answer.detokenizer.flush(), active=active)
            text += tail + ("" if found else answer.stop.flush())
            if found is not None:
                return text, FinishReason.STOP, found
        return text, reason, stop_reason


def _shift(seed: int, index: int) -> int:
    return (seed + index + 2**63) % 2**64 - 2**63


def merge(whole: Output | None, delta: Output, sampling: SamplingParams) -> Output:
    """Fold a delta into the whole output of a prompt (offline use)."""
    if whole is None:
        empty = [Completion(index=i, text="", token_ids=[]) for i in range(sampling.n)]
        whole = Output(
            request_id=delta.request_id,
            prompt_token_ids=delta.prompt_token_ids,
            completions=empty,
        )
    return join(whole, delta)


def join(first: Output, then: Output) -> Output:
    """`first`, changed to hold what `then` adds to it."""
    for part in then.completions:
        into = next((found for found in first.completions if found.index == part.index), None)
        if into is None:
            first.completions.append(part)
            continue
        into.text += part.text
        into.token_ids.extend(part.token_ids)
        into.finish_reason = part.finish_reason or into.finish_reason
        into.stop_reason = into.stop_reason if part.stop_reason is None else part.stop_reason
        if part.logprobs is not None:
            into.logprobs = into.logprobs or []
            into.logprobs.extend(part.logprobs)
    first.finished = then.finished
    first.cached_tokens = then.cached_tokens
    first.prompt_logprobs = first.prompt_logprobs or then.prompt_logprobs
    first.timing = then.timing or first.timing
    return first
