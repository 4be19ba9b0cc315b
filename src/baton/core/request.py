"""A request as it crosses processes, and what comes back. Everything here is msgspec, no pickle."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from baton.core.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are OpenAI's words; the others are Baton's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request(msgspec.Struct, kw_only=True):
    """One sequence to continue. The engine never sees text and never sees `sampling.n > 1`.

    `score` asks for the log-probability rows of all prompt positions from this one on, -1 for none
    (offline use only).
    `priority`: lower is served first. `cache_salt` keeps prefix sharing within a tenant.
    `arrival` is `time.monotonic()` of the accepting process.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    score: int = -1


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's log-probability; `rank` counts from 1 (1 is the most likely token)."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, array_like=True):
    """The chosen token at a position and the `k` best there, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class Timing(msgspec.Struct, array_like=True):
    """Seconds on the engine's clock (`time.monotonic`): queue wait ends at `scheduled`."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class TokenOutput(msgspec.Struct, kw_only=True):
    """What the engine says about one request after one step: new tokens, perhaps the end.

    `cached_tokens` counts prompt tokens taken from the prefix cache at first scheduling.
    `error` is set with FinishReason.ERROR. `timing` is complete once the request is finished.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: str | None = None
    timing: Timing | None = None


class Completion(msgspec.Struct, kw_only=True):
    """One of the `n` answers to a prompt.

    stop_reason: the stop text or token id that ended it, if one of those given did.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None


class Output(msgspec.Struct, kw_only=True):
    """What a caller gets for one prompt. `LLM` returns one whole Output; `AsyncEngine` streams
    deltas (each completion holds only what is new), the last with `finished` set.

    cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    finished: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    timing: Timing | None = None
