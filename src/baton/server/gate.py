"""The outermost layer: API key, HTTP counts, and the last word on unexpected errors."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.server.errors import ApiError, to_api_error
from baton.server.state import ServerState

OPEN = frozenset({"/health", "/health/live"})


class Gate:
    """Plain ASGI middleware, so that streams and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        key = state.options.api_key
        self._key = key.encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                route = getattr(scope.get("route"), "path", "other")
                self._state.metrics.http[route, str(message["status"])] += 1
            await send(message)

        if not self._allowed(scope):
            error = ApiError(401, "missing or wrong API key", code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            await error.response()(scope, receive, counted)
            return
        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            answer = to_api_error(error)
            if not started:
                await answer.response()(scope, receive, counted)

    def _allowed(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        given_bytes = given.strip().encode("latin-1")
        return scheme.lower() == "bearer" and hmac.compare_digest(given_bytes, self._key)
