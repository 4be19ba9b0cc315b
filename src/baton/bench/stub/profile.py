"""What a stub server is programmed to do."""

from __future__ import annotations

from typing import Literal

import msgspec

Fault = Literal[
    "status",
    "full",
    "refuse",
    "html",
    "close",
    "early",
    "no_usage",
    "no_done",
    "invalid",
    "shape",
    "error",
    "abort",
    "stall",
]


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds as a function of prompt tokens and load (requests in flight, this one included):
    base + per_token * tokens + per_request * (load - 1) + over_knee * max(0, load - knee)."""

    base: float = 0.0
    per_token: float = 0.0
    per_request: float = 0.0
    knee: int = 0
    over_knee: float = 0.0

    def at(self, tokens: int, load: int) -> float:
        """Seconds."""
        flat = self.base + self.per_token * tokens + self.per_request * (load - 1)
        return flat + self.over_knee * max(0, load - self.knee)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server's behaviour. Times in seconds.

    ttft: from a request's slot (or the end of its prefill) to its first token, by prompt tokens
        that are not cached.
    itl: between tokens, by the context so far.
    prefill_rate: prompt tokens per second of a stage that all requests pass one after another,
        which plants a capacity; 0 is endless.
    slots: requests answered at once, others wait in order; 0 is endless.
    noise: sigma of a log-normal factor of mean 1 on every time.
    chunk: tokens in each stream event.
    block: tokens in a block of the prefix cache; 0 is no cache and no word about cached tokens.
    cache_blocks: capacity of the cache.
    faults: kind -> n: every n-th request shows it. "status" 500, "full" 429, "refuse" closes at
        once, "html" is no stream; in the middle of a stream "close" breaks the connection, "early"
        ends it, "stall" goes silent, "invalid" is no JSON, "shape" other JSON, "error" an error
        event; at its end "no_usage" and "no_done" leave these out, "abort" is the finish reason.
    """

    ttft: Curve = Curve(base=0.01)
    itl: Curve = Curve(base=0.001)
    prefill_rate: float = 0.0
    slots: int = 0
    noise: float = 0.0
    chunk: int = 1
    block: int = 0
    cache_blocks: int = 2**31
    faults: dict[Fault, int] = {}
    seed: int = 0
    model: str = "stub"
    max_model_len: int = 2**20

    def fault(self, number: int) -> Fault | None:
        """What goes wrong with the request of that number, counted from 0."""
        for kind, every in self.faults.items():
            if number % every == every - 1:
                return kind
        return None
