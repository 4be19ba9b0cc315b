"""Where requests go and in which form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """A server and how to talk to it.

    model: name to ask for; the first that the server lists when None.
    prompts: "ids" sends token ids to /completions; "text" sends text there, "chat" as one message
        to /chat/completions.
    timeout: longest silence of a request in seconds; then it counts as timed out.
    limit: longest a request may take in seconds.
    body: fields added to every request body; None removes one.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    prompts: Literal["ids", "text", "chat"] = "ids"
    vocab: tuple[int, int] = (256, 32000)
    seed: int = 0
    timeout: float = 600.0
    limit: float = 3600.0
    body: dict[str, Any] = field(default_factory=dict)
