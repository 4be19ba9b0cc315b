"""`/v1/completions`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from baton.core.request import Completion, Output, PositionLogprobs
from baton.server.answer import Context, accept, output_fields, read_body, respond
from baton.server.generate import Choice
from baton.server.parse import openapi_body, parse
from baton.server.prompts import completion_prompts, tokenizer_of
from baton.server.schemas import CompletionRequest
from baton.server.state import state_of
from baton.server.tokens import completion_logprobs, prompt_logprobs

router = APIRouter()
Ctx = Context[CompletionRequest]
Positions = list[PositionLogprobs | None]


class CompletionFormat:
    """Shapes of text completions; remembers the text offset of each choice."""

    whole = chunk = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def first(self, context: Ctx, index: int, output: Output) -> dict[str, Any] | None:
        """With `echo`, the prompt; nothing otherwise, unless the prompt's ids are wanted."""
        body = context.body
        if not body.echo and not body.return_token_ids:
            return None
        choice = _choice(index, self._echo(context, index) if body.echo else "")
        if body.echo and output.prompt_logprobs is not None:
            ids = context.job.prompts[index // context.job.n].ids
            choice["logprobs"] = self._logprobs(context, index, output.prompt_logprobs, ids)
        if body.return_token_ids:
            choice["prompt_token_ids"] = context.job.prompts[index // context.job.n].ids
            choice["token_ids"] = []
        return choice

    def delta(self, context: Ctx, index: int, completion: Completion) -> dict[str, Any]:
        """New text of one choice."""
        choice = _choice(index, completion.text)
        if completion.finish_reason is not None:
            choice["finish_reason"] = completion.finish_reason.value
        if completion.logprobs:
            positions: Positions = list(completion.logprobs)
            choice["logprobs"] = self._logprobs(context, index, positions, completion.token_ids)
        return choice | output_fields(context, completion)

    def choice(
        self, context: Ctx, choice: Choice, prompt_positions: Positions | None
    ) -> dict[str, Any]:
        """One whole answer."""
        body, prompt = context.body, context.job.prompts[choice.index // context.job.n]
        text = "".join(choice.text)
        ids, positions = choice.token_ids, list[PositionLogprobs | None](choice.logprobs)
        if body.echo:
            text = self._echo(context, choice.index) + text
            if prompt_positions is not None:
                ids, positions = prompt.ids + ids, prompt_positions + positions
        made = _choice(choice.index, text)
        if body.logprobs is not None:
            made["logprobs"] = self._logprobs(context, choice.index, positions, ids)
        made["finish_reason"] = choice.finish_reason
        if body.prompt_logprobs is not None and prompt_positions is not None:
            made["prompt_logprobs"] = prompt_logprobs(prompt_positions, context.state.token_text)
        if body.return_token_ids:
            made["prompt_token_ids"] = prompt.ids
        return made | output_fields(context, choice)

    def _echo(self, context: Ctx, index: int) -> str:
        prompt = context.job.prompts[index // context.job.n]
        if prompt.text is not None:
            return prompt.text
        return tokenizer_of(context.state.loaded_engine()).decode(prompt.ids)

    def _logprobs(
        self, context: Ctx, index: int, positions: Positions, ids: list[int]
    ) -> dict[str, Any]:
        made, self._offsets[index] = completion_logprobs(
            positions,
            ids,
            context.state.token_text,
            self._offsets.get(index, 0),
            bool(context.body.return_tokens_as_token_ids),
        )
        return made


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


@router.post("/v1/completions", openapi_extra=openapi_body(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    arrival, state = time.monotonic(), state_of(request)
    body = parse(CompletionRequest, await read_body(request, state.options.max_body_bytes))
    engine = state.ready_engine()
    state.model(body.model)
    body.check()
    special = body.add_special_tokens is not False
    prompts = await completion_prompts(engine, body.prompt, special)
    if body.echo:
        tokenizer_of(engine)
    context = await accept(
        request,
        engine,
        body,
        prompts,
        body.sampling(),
        prefix="cmpl",
        fields=("prompt", "max_tokens"),
    )
    return await respond(request, context, CompletionFormat(), arrival)
