"""What all handlers share: the engine once it is there, the options, whether we are draining."""

from __future__ import annotations

import time
from typing import Protocol

from fastapi import Request

from baton.core.errors import Unavailable
from baton.server.errors import ApiError
from baton.server.metrics import Metrics
from baton.server.options import ServerOptions
from baton.server.protocol import EngineClient
from baton.server.tokens import TokenText


class Closable(Protocol):
    """A generation in progress."""

    async def close(self) -> None: ...


class ServerState:
    """Lives as long as the server. `jobs` are the generations in progress."""

    def __init__(self, engine: EngineClient | None, options: ServerOptions) -> None:
        self.options = options
        self.draining = False
        self.created = int(time.time())
        self.jobs: set[Closable] = set()
        self.metrics = Metrics()
        self.engine: EngineClient | None = None
        self.token_text = TokenText(None)
        self.fingerprint = ""
        if engine is not None:
            self.attach(engine)

    def attach(self, engine: EngineClient) -> None:
        """The engine is ready: serve it."""
        self.engine = engine
        self.fingerprint = engine.fingerprint.digest
        self.token_text = TokenText(engine.tokenizer)
        self.metrics.attach(engine, self.model_names[0])

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names clients may use; the first is the one reported."""
        if self.options.served_model_name:
            return self.options.served_model_name
        return (self.engine.info.model,) if self.engine else ("",)

    @property
    def status(self) -> str:
        """`ready`, or the word for why requests are refused."""
        if self.draining:
            return "draining"
        return self.engine.state if self.engine else "starting"

    @property
    def reason(self) -> str:
        """Why requests are refused, for people."""
        if self.draining:
            return "the server is shutting down"
        return self.engine.reason if self.engine else "the engine is starting"

    def ready_engine(self) -> EngineClient:
        """The engine, or Unavailable with the reason."""
        if self.engine is None or self.status != "ready":
            raise Unavailable(f"no requests are taken now: {self.reason}")
        return self.engine

    def loaded_engine(self) -> EngineClient:
        """The engine in whatever state, for questions that need no generation."""
        if self.engine is None:
            raise Unavailable(f"no requests are taken now: {self.reason}")
        return self.engine

    def model(self, name: str | None) -> str:
        """The model name to answer with; 404 when `name` is not served here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; served here: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name


def state_of(request: Request) -> ServerState:
    """The ServerState of the app that a request came to."""
    state: ServerState = request.app.state.baton
    return state
