"""Every failure in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baton.core.errors import QueueFull, RequestError, RequestFailed, Unavailable
from baton.core.log import get_logger

log = get_logger("server")

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A failure with its HTTP status, ready to be sent.

    Args:
        status: HTTP status.
        message: what is wrong, for the caller.
        param: request field at fault.
        code: OpenAI's machine-readable code.
        retry_after: seconds after which the caller may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """The JSON object that clients parse."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(
            msgspec.json.encode(self.body()),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


def to_api_error(error: Exception) -> ApiError:
    """The ApiError for anything that may be raised while a request is served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=error.retry_after)
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable", retry_after=error.retry_after)
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, HTTPException):
        return _http_error(error)
    log.error("internal error: %s", type(error).__name__, exc_info=error)
    return ApiError(500, "internal server error", code="internal_error")


def _http_error(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    made = ApiError(error.status_code, str(error.detail), code=code)
    made.headers.update(error.headers or {})
    return made


async def handle(request: Request, error: Exception) -> Response:
    """FastAPI exception handler for every class above."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error.detail = f"{error.detail}: {request.method} {request.url.path}"
    return to_api_error(error).response()
