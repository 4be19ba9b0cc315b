"""The road both endpoints share: read, parse, submit, and answer whole or as a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import Request, Response

from baton.core.errors import RequestError
from baton.core.request import Completion, Output, PositionLogprobs
from baton.core.sampling import SamplingParams
from baton.server.errors import ApiError
from baton.server.generate import Choice, Job
from baton.server.prompts import Prompt, check_length
from baton.server.protocol import EngineClient
from baton.server.schemas import GenerationRequest
from baton.server.state import ServerState, state_of
from baton.server.stream import DONE, EventStream, encode, until_disconnect

R = TypeVar("R", bound=GenerationRequest)
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Context(Generic[R]):
    """An accepted request: what was asked, and the job that answers it."""

    state: ServerState
    body: R
    job: Job
    request_id: str
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every answer and chunk starts with."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.job.created,
            "model": self.model,
            "system_fingerprint": self.state.fingerprint[:16],
        }


class Format(Protocol[R]):
    """How one endpoint's answers look."""

    whole: str
    chunk: str

    def first(self, context: Context[R], index: int, output: Output) -> dict[str, Any] | None:
        """A chunk choice sent once before choice `index` begins (with `output`), if any."""

    def delta(self, context: Context[R], index: int, completion: Completion) -> dict[str, Any]:
        """A chunk choice with what is new."""

    def choice(
        self,
        context: Context[R],
        choice: Choice,
        prompt_logprobs: list[PositionLogprobs | None] | None,
    ) -> dict[str, Any]:
        """A whole choice."""


async def read_body(request: Request, limit: int) -> bytes:
    """The request body; 413 as soon as it is known to be over `limit` bytes."""
    too_large = ApiError(
        413, f"the request body is larger than {limit} bytes", code="request_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def check_sampling(sampling: SamplingParams, vocab_size: int, limit_field: str) -> None:
    """Verify ranges; errors about `max_tokens` name the field the client used."""
    try:
        sampling.verify(vocab_size)
    except RequestError as error:
        if error.param != "max_tokens" or limit_field == "max_tokens":
            raise
        message = str(error).replace("max_tokens", limit_field, 1)
        raise RequestError(message, param=limit_field, code=error.code) from None
    if sampling.top_k > _INT32:
        raise RequestError(f"top_k must be at most {_INT32}", param="top_k")


async def accept(
    request: Request,
    engine: EngineClient,
    body: R,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    prefix: str,
    fields: tuple[str, str],
) -> Context[R]:
    """Check limits and submit. `fields`: names of the prompt field and of the limit field."""
    state = state_of(request)
    check_sampling(sampling, engine.info.vocab_size, fields[1])
    check_length(prompts, sampling, engine.info.max_model_len, *fields)
    priority = body.priority or 0
    if abs(priority) > _INT32:
        raise RequestError(f"priority must be in [-{_INT32}, {_INT32}]", param="priority")
    request_id = f"{prefix}-{uuid.uuid4().hex}"
    job = Job(state, prompts, sampling.n)
    await job.submit(engine, sampling, request_id, priority, body.cache_salt or "")
    return Context(state, body, job, request_id, state.model(body.model))


async def respond(
    request: Request, context: Context[R], form: Format[R], arrival: float
) -> Response:
    """The HTTP answer, whole or streamed."""
    job, headers = context.job, {"X-Request-Id": context.request_id}
    if context.body.stream:
        return EventStream(
            _events(context, form, arrival),
            job.close,
            context.state.options.keepalive_seconds,
            headers,
        )
    try:
        result = await until_disconnect(request.receive, job.collect(arrival))
    finally:
        await job.close()
    if result is None:
        return Response(status_code=499)
    choices, prompt_logprobs = result
    answer = context.head(form.whole)
    answer["choices"] = [
        form.choice(context, choice, prompt_logprobs[choice.index // job.n]) for choice in choices
    ]
    answer["usage"] = job.usage()
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)


async def _events(context: Context[R], form: Format[R], arrival: float) -> AsyncIterator[bytes]:
    job, begun = context.job, set[int]()
    head = b"data: " + encode(context.head(form.chunk))[:-1] + b',"choices":['
    event = _framer(context, head)
    async for i, output in job.outputs(arrival):
        chunk = b""
        for completion in output.completions:
            if not (completion.token_ids or completion.text or completion.finish_reason):
                continue
            index = i * job.n + completion.index
            if index not in begun:
                begun.add(index)
                if (first := form.first(context, index, output)) is not None:
                    chunk += event(first)
            chunk += event(form.delta(context, index, completion))
        if chunk:
            yield chunk
    if context.body.include_usage:
        yield head + b'],"usage":' + encode(job.usage()) + b"}\n\n"
    yield DONE


def _framer(context: Context[R], head: bytes) -> Callable[[dict[str, Any]], bytes]:
    tail = b'],"usage":null}\n\n' if context.body.include_usage else b"]}\n\n"
    if not context.body.continuous_usage:
        return lambda choice: head + encode(choice) + tail
    usage = context.job.usage
    return lambda choice: head + encode(choice) + b'],"usage":' + encode(usage()) + b"}\n\n"


def output_fields(context: Context[R], completion: Completion | Choice) -> dict[str, Any]:
    """vLLM's extra fields of a choice: `stop_reason`, and `token_ids` when asked for."""
    extra: dict[str, Any] = {"stop_reason": completion.stop_reason}
    if context.body.return_token_ids:
        extra["token_ids"] = completion.token_ids
    return extra
