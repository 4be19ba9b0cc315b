"""The HTTP application, and `serve()`: engine and HTTP in one process tree."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from baton import __version__
from baton.config.options import EngineOptions
from baton.core import env
from baton.core.errors import BatonError, Unavailable
from baton.core.log import get_logger
from baton.server import chat, completions, openai
from baton.server.errors import ApiError, handle
from baton.server.gate import Gate
from baton.server.options import ServerOptions
from baton.server.process import HttpServer, bind
from baton.server.protocol import EngineClient
from baton.server.state import ServerState

log = get_logger("server")
StartEngine = Callable[[EngineOptions], Awaitable[EngineClient]]


def create_app(engine: EngineClient | None, options: ServerOptions) -> FastAPI:
    """The application. Without an engine it answers 503 until `app.state.baton.attach(engine)`."""
    app = FastAPI(title="Baton", version=__version__, redoc_url=None)
    state = app.state.baton = ServerState(engine, options)
    for router in (completions.router, chat.router, openai.router):
        app.include_router(router)
    for kind in (BatonError, ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, handle)
    app.add_middleware(Gate, state=state)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def serve(
    options: ServerOptions,
    engine_options: EngineOptions,
    start_engine: StartEngine | None = None,
) -> int:
    """Serve until a signal, or the engine is dead; returns the exit code of the process.

    The port is bound before the engine starts, so a busy port fails at once. HTTP answers from
    then on (`/health` says "starting"). The first SIGTERM or SIGINT drains, a second one ends.

    Raises:
        ConfigError: the address cannot be bound.
        BatonError: whatever the engine raises while starting.
        Unavailable: the engine died, and is not started again.
    """
    names = options.served_model_name or (engine_options.model.model,)
    key = options.api_key or env.API_KEY.get() or None
    options = dataclasses.replace(options, served_model_name=names, api_key=key)
    socket = bind(options.host, options.port)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            session = _Session(options, HttpServer(create_app(None, options), socket, options))
            return runner.run(session.run(engine_options, start_engine or _start_engine))
    finally:
        socket.close()


async def _start_engine(options: EngineOptions) -> EngineClient:
    from baton.engine.async_engine import AsyncEngine  # imports torch

    return await AsyncEngine.start(options)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


class _Session:
    """One run of the server: starting -> ready -> draining -> ended. An engine that is dead takes
    the way of a first signal: open requests are told, then the server ends."""

    def __init__(self, options: ServerOptions, http: HttpServer) -> None:
        self._options, self._http = options, http
        self._state: ServerState = http.app.state.baton
        self._signal: asyncio.Event = asyncio.Event()
        self._forced: asyncio.Event = asyncio.Event()
        self._code = 0

    async def run(self, engine_options: EngineOptions, start: StartEngine) -> int:
        """Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self._http.run())
        stopping = asyncio.create_task(self._signal.wait())
        starting = asyncio.ensure_future(start(engine_options))
        engine: EngineClient | None = None
        dead = ""
        try:
            await _first(starting, stopping, http)
            if starting.done():
                engine = starting.result()
                self._ready(engine)
                dead = await self._until_dead(engine, stopping, http)
            if http.done():
                http.result()
            if engine is not None:
                await self._drain(engine)
        finally:
            await _cancel(stopping)
            await _cancel(starting)
            if engine is not None:
                await self._stop(engine)
            await self._http.close(http, force=self._forced.is_set())
        if dead:
            raise Unavailable(dead)
        return self._code

    async def _until_dead(self, engine: EngineClient, *others: asyncio.Future[Any]) -> str:
        """Why the engine is dead; "" when one of the others was done first."""
        dying = asyncio.create_task(engine.dead())
        await _first(dying, *others)
        dead = "" if any(other.done() for other in others) else dying.result()
        await _cancel(dying)
        return dead

    def _ready(self, engine: EngineClient) -> None:
        self._state.attach(engine)
        log.info(
            "ready on %s  model %s  fingerprint %s",
            self._http.url,
            ", ".join(self._state.model_names),
            self._state.fingerprint[:16],
        )

    def _on_signal(self, number: int) -> None:
        if self._signal.is_set():
            self._code = 128 + number
            self._forced.set()
            return
        self._state.draining = True
        self._signal.set()
        log.info("%s: draining, a second signal ends at once", signal.Signals(number).name)

    async def _drain(self, engine: EngineClient) -> None:
        drained = asyncio.create_task(self._finish_running(engine))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait(
            {drained, forced},
            timeout=self._options.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._state.jobs:
            log.warning("%d requests had not finished", len(self._state.jobs))
        await _cancel(drained)
        await _cancel(forced)

    async def _finish_running(self, engine: EngineClient) -> None:
        """Answers end when the engine has computed them *and* clients have read them."""
        await engine.drain(self._options.drain_seconds)
        while self._state.jobs:
            await asyncio.sleep(0.05)

    async def _stop(self, engine: EngineClient) -> None:
        """End the engine; it gets a moment, less of it after a second signal."""
        stopped = asyncio.ensure_future(engine.stop())
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({stopped, forced}, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done() and self._forced.is_set():
            await asyncio.wait({stopped}, timeout=2.0)
        await _cancel(forced)
        if not stopped.done():
            log.error("the engine did not stop in time and is killed")
        await _cancel(stopped)


async def _first(*tasks: asyncio.Future[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=5.0)
