"""What a user may say about the HTTP server; same style as `config/options.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from baton.core.errors import ConfigError
from baton.core.units import parse_bytes, parse_seconds


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, who may use it, and its limits."""

    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one and prints it"] = 8000
    api_key: Annotated[
        str | None, "key that clients must send as a bearer token (also BATON_API_KEY)"
    ] = field(default=None, repr=False)
    served_model_name: Annotated[
        tuple[str, ...],
        "name clients use for the model (may be repeated; the first one is reported)",
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], "origin allowed to call from a browser (may be repeated)"
    ] = ()
    max_body: Annotated[str, "largest request body, for example 32MiB"] = "32MiB"
    request_timeout: Annotated[
        str,
        "how long a request may take to come, from its first byte on; a second more for each "
        "16 KiB of its body",
    ] = "30s"
    drain_timeout: Annotated[str, "how long running requests may take after SIGTERM"] = "30s"
    keepalive_interval: Annotated[
        str, "silence on a stream before a comment is sent to keep proxies from closing it"
    ] = "15s"
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"], "log level of the HTTP layer"
    ] = "warning"
    access_log: Annotated[bool, "log one line per HTTP request (never its content)"] = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        try:
            values = {
                "max_body": self.max_body_bytes,
                "request_timeout": self.request_seconds,
                "drain_timeout": self.drain_seconds,
                "keepalive_interval": self.keepalive_seconds,
            }
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for name, value in values.items():
            if value <= 0 and name != "drain_timeout":
                raise ConfigError(f"{name} must be more than 0")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii()):
            raise ConfigError("api_key must be non-empty ASCII")

    @property
    def max_body_bytes(self) -> int:
        """`max_body` in bytes."""
        return parse_bytes(self.max_body)

    @property
    def request_seconds(self) -> float:
        """`request_timeout` in seconds."""
        return parse_seconds(self.request_timeout)

    @property
    def drain_seconds(self) -> float:
        """`drain_timeout` in seconds."""
        return parse_seconds(self.drain_timeout)

    @property
    def keepalive_seconds(self) -> float:
        """`keepalive_interval` in seconds."""
        return parse_seconds(self.keepalive_interval)
