"""Sampling flags that `generate` and `chat` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from baton.core.sampling import SamplingParams


@dataclass(frozen=True)
class SamplingFlags:
    """The part of SamplingParams that is handy on a command line."""

    max_tokens: Annotated[int, "most tokens of one answer"] = 256
    temperature: Annotated[float, "0 always takes the likeliest token"] = 0.0
    top_p: Annotated[float, "sample from the likeliest tokens of this total probability"] = 1.0
    top_k: Annotated[int, "sample from this many likeliest tokens; 0 for all"] = 0
    min_p: Annotated[float, "drop tokens less likely than this share of the likeliest"] = 0.0
    repetition_penalty: Annotated[float, "above 1 makes tokens that were used less likely"] = 1.0
    stop: Annotated[tuple[str, ...], "text that ends the answer (may be repeated)"] = ()

    def params(self) -> SamplingParams:
        """Checked SamplingParams; RequestError names a value out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=list(self.stop),
        ).verify()

    def body(self) -> dict[str, Any]:
        """The same as fields of an OpenAI request (with vLLM's extra ones)."""
        params = self.params()
        return {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "stop": params.stop or None,
        }
