"""Errors that people see. Each names the thing that is wrong and what was expected instead."""

from __future__ import annotations


class BatonError(Exception):
    """Base of every error Baton raises on purpose."""


class ConfigError(BatonError):
    """The options contradict one another or the machine; raised before anything is started."""


class ModelError(BatonError):
    """A model folder or file cannot be served.

    Args:
        file: file (or folder) at fault.
        problem: what was found there.
        expected: what was expected instead.
        tensor: name of the tensor at fault, if it is about one.
    """

    def __init__(
        self, *, file: object, problem: str, expected: str = "", tensor: str | None = None
    ) -> None:
        self.file = str(file)
        self.tensor = tensor
        self.problem = problem
        self.expected = expected
        where = f"{self.file}: tensor {tensor!r}" if tensor else self.file
        tail = f" (expected {expected})" if expected else ""
        super().__init__(f"{where}: {problem}{tail}")


class FingerprintMismatch(BatonError):
    """Two parties that must agree on model, weights, layout or version do not."""

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        self.field, self.ours, self.theirs = field, ours, theirs
        super().__init__(
            f"fingerprint field {field!r} differs: this engine has {ours!r}, expected {theirs!r}"
        )


class RequestError(BatonError):
    """One request is not acceptable (HTTP 400). `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class QueueFull(BatonError):
    """The waiting queue is at its limit (HTTP 429). Retry after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class Unavailable(BatonError):
    """The engine is starting, draining, restarting or dead (HTTP 503)."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class RequestFailed(BatonError):
    """An accepted request could not be finished (HTTP 500); the engine itself goes on."""
