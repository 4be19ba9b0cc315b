"""How one request wants its tokens chosen. Names and defaults are those vLLM users know."""

from __future__ import annotations

import math

import msgspec

from baton.core.errors import RequestError
from baton.core.kinds import wrong_kind

#: every new token is compared with all of them
MAX_STOPS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling options of a request; checked by `verify()`.

    n: answers to one prompt.
    max_tokens: most tokens of an answer; all that fit if null or None.
    min_tokens: no end before so many tokens.
    temperature: 0 always takes the likeliest token.
    top_k: choose among the k likeliest tokens; 0 or -1: among all.
    top_p: choose among the likeliest tokens that together have this probability.
    min_p: drop tokens less likely than this share of the likeliest.
    repetition_penalty: above 1 makes tokens of prompt and answer less likely.
    presence_penalty: subtracted from the logit of each token that the answer has already.
    frequency_penalty: subtracted from it for each time the answer has it.
    logit_bias: added to the logits of these tokens, -100 to 100.
    seed: the same seed and prompt give the same tokens, whatever else runs beside it.
    stop: texts that end the answer.
    stop_token_ids: tokens that end the answer, beside the model's own.
    include_stop_str_in_output: keep the stop text at the end of the answer.
    ignore_eos: go on after the model's own end.
    skip_special_tokens: leave special tokens out of the text.
    logprobs: k: log-probabilities of the chosen token and of the k likeliest at each position.
    prompt_logprobs: k: as `logprobs`, for the prompt, which then skips the prefix cache.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the choice depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def verify(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self, or raise RequestError naming the field and the kind or range it must be."""
        if (wrong := wrong_kind(SamplingParams, msgspec.structs.asdict(self))) is not None:
            raise RequestError(wrong[1], param=wrong[0])
        _check("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, None)
            _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("min_tokens", self.min_tokens, 0, None)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, -1, None)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0, got 0", param="top_p")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check(name, value, 0, 100)
        for name, given in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if len(given) > MAX_STOPS:
                raise RequestError(
                    f"{name} may have at most {MAX_STOPS} entries, got {len(given)}", param=name
                )
        if any(not text for text in self.stop):
            raise RequestError("stop strings must not be empty", param="stop")
        for token, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token} must be in [-100, 100], got {bias}",
                    param="logit_bias",
                )
        if vocab_size is not None:
            for name, ids in (
                ("logit_bias", self.logit_bias or {}),
                ("stop_token_ids", self.stop_token_ids),
            ):
                for token in ids:
                    if not 0 <= token < vocab_size:
                        raise RequestError(
                            f"{name}: token {token} is outside the vocabulary of {vocab_size}",
                            param=name,
                        )
        return self


def _check(name: str, value: float, low: float | None, high: float | None) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{name} must be finite, got {value}", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {span}, got {value}", param=name)
