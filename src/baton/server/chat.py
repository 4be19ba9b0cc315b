"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from baton.core.request import Completion, Output, PositionLogprobs
from baton.server.answer import Context, accept, output_fields, read_body, respond
from baton.server.generate import Choice
from baton.server.parse import openapi_body, parse
from baton.server.prompts import Prompt, chat_ids, tokenizer_of
from baton.server.schemas import ChatRequest
from baton.server.state import state_of
from baton.server.tokens import chat_logprobs, prompt_logprobs

router = APIRouter()
Ctx = Context[ChatRequest]


class ChatFormat:
    """Shapes of chat completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def first(self, context: Ctx, index: int, output: Output) -> dict[str, Any] | None:
        """The role; sent with the first token, so that it does not look like one."""
        choice = _delta(index, {"role": "assistant", "content": ""})
        if context.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def delta(self, context: Ctx, index: int, completion: Completion) -> dict[str, Any]:
        """New text of one choice."""
        content = {"content": completion.text} if completion.text else {}
        choice = _delta(index, content)
        if completion.logprobs:
            choice["logprobs"] = self._logprobs(context, completion.logprobs)
        if completion.finish_reason is not None:
            choice["finish_reason"] = completion.finish_reason.value
        return choice | output_fields(context, completion)

    def choice(
        self, context: Ctx, choice: Choice, prompt_positions: list[PositionLogprobs | None] | None
    ) -> dict[str, Any]:
        """One whole answer."""
        body = context.body
        made: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(context, choice.logprobs) if body.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if body.prompt_logprobs is not None and prompt_positions is not None:
            made["prompt_logprobs"] = prompt_logprobs(prompt_positions, context.state.token_text)
        if body.return_token_ids:
            made["prompt_token_ids"] = context.job.prompts[0].ids
        return made | output_fields(context, choice)

    def _logprobs(self, context: Ctx, positions: list[PositionLogprobs]) -> dict[str, Any]:
        as_id = bool(context.body.return_tokens_as_token_ids)
        return chat_logprobs(positions, context.state.token_text, as_id)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


@router.post("/v1/chat/completions", openapi_extra=openapi_body(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival, state = time.monotonic(), state_of(request)
    raw = await read_body(request, state.options.max_body_bytes)
    body = parse(ChatRequest, raw)
    engine = state.ready_engine()
    state.model(body.model)
    body.check()
    most = engine.info.max_model_len - 1
    ids = await chat_ids(tokenizer_of(engine), body.messages, body, len(raw), most)
    context = await accept(
        request,
        engine,
        body,
        [Prompt(ids)],
        body.sampling(),
        prefix="chatcmpl",
        fields=("messages", body.token_limit[0]),
    )
    return await respond(request, context, ChatFormat(), arrival)
