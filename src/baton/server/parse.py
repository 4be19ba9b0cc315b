"""Bytes to request models, and request models to OpenAPI."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel

from baton.core.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: bytes) -> Body:
    """`body` as a `kind`; RequestError names the first field that is wrong, never its value.

    The event loop waits meanwhile. It would in any case: parsers written in C or Rust hold Python's
    lock from end to end, so that a thread frees nothing.
    """
    try:
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        detail = first["msg"].removeprefix("Invalid JSON: ")
        raise RequestError(f"the body is not valid JSON: {detail}", code="invalid_json")
    if not first["loc"]:
        raise RequestError("the body must be a JSON object")
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])[1:]
    raise RequestError(f"{path}: {first['msg']}", param=path)


def openapi_body(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `kind` (routes parse their bodies themselves)."""
    schema = kind.model_json_schema()
    shared = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(shared[node["$ref"].rpartition("/")[2]])
        return {key: inline(value) for key, value in node.items()}

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}
