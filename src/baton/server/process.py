"""Sockets and uvicorn, run from our own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from baton.core.errors import ConfigError
from baton.core.log import get_logger
from baton.server.options import ServerOptions
from baton.server.patience import patient

_BACKLOG = 2048
#: seconds that a connection may be idle, before its first request and between two
KEEP_ALIVE = 75


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on `host:port`, or ConfigError that says why there is none."""
    made: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS could know
        if made is not None:
            made.close()
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason = "another program uses this port; choose one with --port, or --port 0"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None
    made.setblocking(False)
    return made


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `serve()` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """uvicorn on a bound socket."""

    def __init__(self, app: FastAPI, bound: socket.socket, options: ServerOptions) -> None:
        self.app, self._socket = app, bound
        host, port = bound.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).parent = get_logger("http")
        config = uvicorn.Config(
            app,
            lifespan="off",
            http=patient(options.request_seconds),
            ws="none",
            log_config=None,
            log_level=options.uvicorn_log_level,
            access_log=options.access_log,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=3,
        )
        if options.access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self._server = _Uvicorn(config)

    async def run(self) -> None:
        """Serve until `close()`."""
        await self._server.serve(sockets=[self._socket])

    async def close(self, running: asyncio.Task[None], *, force: bool = False) -> None:
        """Close idle connections, give answers in progress a moment (or not), then return."""
        self._server.should_exit, self._server.force_exit = True, force
        await asyncio.wait({running}, timeout=5.0)
