"""Where requests go and in which form."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from baton.bench.sse import api_base
from baton.bench.workload.prompts import PromptMaker, TextPrompts, TokenPrompts
from baton.core.errors import ConfigError

#: asked for unless the user says otherwise; usage with every event tells how many tokens are in it
FIELDS: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
#: fields that the load itself fills
FILLED = ("prompt", "messages", "max_tokens", "model", "stream")


@dataclass(frozen=True)
class Target:
    """A server and how to talk to it.

    model: name to ask for; the first that the server lists when None.
    prompts: "ids" sends token ids to /completions, "text" sends text there, "chat" sends it as one
        user message to /chat/completions.
    vocab: token ids are drawn from [low, high).
    corpus: text that "text" and "chat" are made from; that of the Python manual when None.
    seed / salt: others make other prompts of the same lengths and sharing. The seed belongs to the
        workload; the salt keeps a server that has seen it from answering from its prefix cache.
    timeout: longest silence of a request in seconds; then it counts as timed out.
    limit: most seconds that a request may take.
    body: fields added to every request's body; None leaves one out that is there by default.

    Raises:
        ConfigError: a field makes no sense.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    prompts: Literal["ids", "text", "chat"] = "ids"
    vocab: tuple[int, int] = (256, 32000)
    corpus: Path | None = None
    seed: int = 0
    salt: int = 0
    timeout: float = 600.0
    limit: float = 3600.0
    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _is_http(api_base(self.base_url)):
            raise ConfigError(
                f"{self.base_url!r} is not the URL of a server: expected http://HOST:PORT"
            )
        if not (self.timeout > 0 and self.limit > 0):
            raise ConfigError("timeout and limit of a request must be above 0 seconds")
        if self.seed < 0 or self.salt < 0:
            raise ConfigError(f"seed and salt must be at least 0, got {self.seed}, {self.salt}")
        if taken := sorted(set(self.body) & set(FILLED)):
            raise ConfigError(f"body must not set {', '.join(taken)}: the load fills these")

    @property
    def path(self) -> str:
        """Where under the API's base requests go."""
        return "/chat/completions" if self.prompts == "chat" else "/completions"

    def prompt_maker(self) -> PromptMaker:
        """What makes the prompts of this target."""
        if self.prompts == "ids":
            return TokenPrompts(self.vocab, self.seed + self.salt)
        return TextPrompts(self.seed + self.salt, self.corpus, chat=self.prompts == "chat")

    def fields(self, model: str) -> bytes:
        """The end of every request's body: JSON of the fields that do not change."""
        merged = {"model": model, **FIELDS, **self.body}
        return msgspec.json.encode({k: v for k, v in merged.items() if v is not None})[1:]

    def about(self) -> dict[str, Any]:
        """What a reader must know to make the same workload again; never the key."""
        made = self.prompt_maker()
        source: dict[str, Any] = {"vocab": list(self.vocab)}
        if isinstance(made, TextPrompts):
            source = {"corpus": str(self.corpus or "Python manual"), "sha256": made.digest}
        told = {"prompts": self.prompts, "prompt_seed": self.seed, **source}
        return {**told, "timeout": self.timeout, "limit": self.limit, "body": self.body}


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or none of TCP's
        return False
