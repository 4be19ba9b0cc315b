"""The rest of the OpenAI-compatible API: models, tokenize, detokenize, health, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from baton import __version__
from baton.core.errors import RequestError
from baton.server.answer import read_body
from baton.server.parse import openapi_body, parse
from baton.server.prompts import chat_ids, check_ids, encode, off_loop, tokenizer_of
from baton.server.schemas import DetokenizeRequest, TokenizeRequest
from baton.server.state import ServerState, state_of

router = APIRouter()


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value), status, media_type="application/json", headers=headers
    )


def _card(state: ServerState, name: str) -> dict[str, Any]:
    engine = state.loaded_engine()
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "baton",
        "root": state.model_names[0],
        "parent": None,
        "max_model_len": engine.info.max_model_len,
        "fingerprint": {"digest": state.fingerprint, **engine.fingerprint.to_dict()},
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name the model is served under."""
    state = state_of(request)
    state.loaded_engine()
    cards = [_card(state, name) for name in state.model_names]
    return _json({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> Response:
    """One of them."""
    state = state_of(request)
    state.loaded_engine()
    return _json(_card(state, state.model(name)))


@router.post("/tokenize", openapi_extra=openapi_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of messages, also of those that are too long for the model; but what
    is certain to have more than `max_model_len` tokens is refused before it is tokenized."""
    state = state_of(request)
    raw = await read_body(request, state.options.max_body_bytes)
    body = parse(TokenizeRequest, raw)
    engine = state.loaded_engine()
    state.model(body.model)
    tokenizer, limit = tokenizer_of(engine), engine.info.max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = await chat_ids(tokenizer, body.messages, body, len(raw), limit)
    else:
        special = body.add_special_tokens is not False
        ids = await encode(tokenizer, body.prompt or "", special, limit)
    strings = None
    if body.return_token_strs:
        strings = await off_loop(len(ids), lambda: [state.token_text(i) for i in ids])
    return _json(
        {
            "count": len(ids),
            "max_model_len": limit,
            "tokens": ids,
            "token_strs": strings,
        }
    )


@router.post("/detokenize", openapi_extra=openapi_body(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of token ids, of at most `max_model_len`."""
    state = state_of(request)
    body = parse(DetokenizeRequest, await read_body(request, state.options.max_body_bytes))
    engine = state.loaded_engine()
    state.model(body.model)
    tokenizer, info = tokenizer_of(engine), engine.info
    count = len(body.tokens) if isinstance(body.tokens, list) else 0
    if count > info.max_model_len:
        raise RequestError(
            f"tokens may have at most {info.max_model_len} ids, got {count}",
            param="tokens",
            code="context_length_exceeded",
        )

    def decoded() -> str:
        ids = check_ids(body.tokens, info.vocab_size, "tokens")
        return tokenizer.decode(ids, skip_special=False)

    return _json({"prompt": await off_loop(count, decoded)})


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are taken, 503 with the reason otherwise."""
    state = state_of(request)
    if state.status == "ready":
        return _json({"status": "ready"})
    answer = {"status": state.status, "reason": state.reason}
    return _json(answer, 503, {"Retry-After": "1"})


@router.get("/health/live")
async def live(request: Request) -> Response:
    """200 unless only a restart can help."""
    status = state_of(request).status
    return _json({"status": status}, 503 if status == "dead" else 200)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    accept = request.headers.get("accept", "")
    body, content_type = await state_of(request).metrics.scrape(accept)
    return Response(body, headers={"Content-Type": content_type})


@router.get("/version")
async def show_version() -> Response:
    """Version of the package."""
    return _json({"version": __version__})
