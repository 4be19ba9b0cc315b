"""What travels between the API process and the engine process: msgspec, tagged by type."""

from __future__ import annotations

import msgspec

from baton.core.errors import (
    BatonError,
    ConfigError,
    FingerprintMismatch,
    ModelError,
    Unavailable,
)
from baton.core.request import Request, TokenOutput
from baton.core.stats import EngineStats


class Add(msgspec.Struct, tag=True):
    """Queue requests (the `n` answers of one prompt) together, or none of them."""

    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    """Stop requests; ids that have ended already are ignored."""

    request_ids: list[str]


class AskStats(msgspec.Struct, tag=True):
    """Ask for EngineStats."""

    number: int


class Stop(msgspec.Struct, tag=True):
    """End the engine process now."""


ToEngine = Add | Abort | AskStats | Stop


class EngineInfo(msgspec.Struct, tag=True):
    """The engine is ready; what callers need to know about it. `max_model_len` in tokens,
    `longest_step` in seconds, as `Scheduler.longest_step`."""

    model: str
    vocab_size: int
    max_model_len: int
    fingerprint: dict[str, str | int]
    longest_step: float = 0.0


class Accepted(msgspec.Struct, tag=True):
    """All requests of one Add are queued; `request_id` is the first one's."""

    request_id: str


class Rejected(msgspec.Struct, tag=True):
    """Add was refused. `kind` is "request" (its own fault) or "full" (queue limit)."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 1.0


class Outputs(msgspec.Struct, tag=True):
    """What one step produced."""

    outputs: list[TokenOutput]


class StatsReply(msgspec.Struct, tag=True):
    """Answer to AskStats."""

    number: int
    stats: EngineStats


class Fatal(msgspec.Struct, tag=True):
    """The engine cannot start or go on; the process ends after this.

    `kind` names the error: "config", "model", "fingerprint" or "engine"; the first three will not
    get better by restarting. `details` are the error's own fields, to raise it again over there.
    """

    kind: str
    message: str
    details: dict[str, str | None] = {}

    @classmethod
    def of(cls, error: BaseException) -> Fatal:
        """The message that describes an error."""
        message = str(error) or type(error).__name__
        if isinstance(error, ModelError):
            names = ("file", "problem", "expected", "tensor")
            return cls("model", message, {name: getattr(error, name) for name in names})
        if isinstance(error, FingerprintMismatch):
            fields = ("field", "ours", "theirs")
            return cls("fingerprint", message, {name: getattr(error, name) for name in fields})
        return cls("config" if isinstance(error, ConfigError) else "engine", message)

    def error(self) -> BatonError:
        """The error this message describes."""
        if self.kind == "model":
            return ModelError(**self.details)  # type: ignore[arg-type]
        if self.kind == "fingerprint":
            return FingerprintMismatch(**self.details)  # type: ignore[arg-type]
        return (ConfigError if self.kind == "config" else Unavailable)(self.message)


FromEngine = EngineInfo | Accepted | Rejected | Outputs | StatsReply | Fatal
