"""From a request's prompt or messages to token ids, checked against the model's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.core.errors import RequestError
from baton.core.sampling import SamplingParams
from baton.server.protocol import EngineClient, Tokenizer
from baton.server.schemas import ChatMessage, TemplateFields

T = TypeVar("T")
_INLINE = 4096  # characters or tokens handled on the event loop; more of them go to a thread
MAX_ANSWERS = 2048  # of one request
_RESERVED = frozenset({"self", "conversation", "messages", "tools", "documents", "chat_template"})
_RESERVED |= {"add_generation_prompt", "continue_final_message", "tokenize", "padding"}
_RESERVED |= {"truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
_RESERVED |= {"return_assistant_tokens_mask", "most_tokens"}


@dataclass(frozen=True)
class Prompt:
    """One prompt as the engine takes it; `text` is what the user wrote, if it was text."""

    ids: list[int]
    text: str | None = None


def tokenizer_of(engine: EngineClient) -> Tokenizer:
    """The engine's tokenizer, or RequestError when it serves token ids only."""
    if engine.tokenizer is None:
        raise RequestError(
            "this server has no tokenizer: send token ids to /v1/completions", param="prompt"
        )
    return engine.tokenizer


async def encode(tokenizer: Tokenizer, text: str, special: bool, most: int) -> list[int]:
    """Token ids of `text`. One that is certain to have more than `most` is refused, before the
    work; how many others have is only known after it."""
    return await off_loop(len(text), lambda: tokenizer.encode(text, special, most))


async def completion_prompts(engine: EngineClient, value: Any, special: bool) -> list[Prompt]:
    """The prompts in `prompt`: a string, strings, ids, or lists of ids.

    Nothing is looked at one by one before it has been counted.
    """
    vocab, limit = engine.info.vocab_size, engine.info.max_model_len
    if isinstance(value, str):
        return [Prompt(await encode(tokenizer_of(engine), value, special, limit - 1), value)]
    if isinstance(value, list) and value:
        if type(value[0]) is int:
            _fits(len(value), limit, "prompt")
            return [Prompt(await off_loop(len(value), lambda: check_ids(value, vocab, "prompt")))]
        if len(value) > MAX_ANSWERS:
            raise RequestError(
                f"one request may have at most {MAX_ANSWERS} prompts, got {len(value)}",
                param="prompt",
            )
        kinds = set(map(type, value))
        if kinds == {str}:
            tokenizer = tokenizer_of(engine)

            def encoded() -> list[Prompt]:
                return [Prompt(tokenizer.encode(t, special, limit - 1), t) for t in value]

            return await off_loop(sum(map(len, value)), encoded)
        if kinds == {list}:
            named = {f"prompt[{i}]": ids for i, ids in enumerate(value)}
            for name, ids in named.items():
                _fits(len(ids), limit, name)

            def checked() -> list[Prompt]:
                return [Prompt(check_ids(ids, vocab, name)) for name, ids in named.items()]

            return await off_loop(sum(map(len, value)), checked)
    raise RequestError(
        "prompt must be a non-empty string, list of strings, list of token ids, or list of lists "
        "of token ids",
        param="prompt",
    )


def check_ids(value: Any, vocab_size: int, name: str) -> list[int]:
    """`value` if it is a list of ids inside the vocabulary."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise RequestError(f"{name} must be a list of token ids", param=name)
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise RequestError(
            f"{name} has token ids outside the vocabulary of {vocab_size}", param=name
        )
    return value


async def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    fields: TemplateFields,
    size: int,
    most: int,
) -> list[int]:
    """Token ids of a conversation under the model's chat template; `size` is that of the request,
    in bytes. One that is certain to have more than `most` is refused, as texts are by `encode`."""
    for name in ("chat_template", "continue_final_message"):
        if getattr(fields, name):
            raise RequestError(f"{name} is not supported", param=name, code="unsupported")
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template: use /v1/completions", param="messages")
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    more = dict(fields.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & more.keys()):
        raise RequestError(
            f"chat_template_kwargs must not contain {', '.join(reserved)}",
            param="chat_template_kwargs",
        )
    if fields.reasoning_effort is not None:
        more.setdefault("reasoning_effort", fields.reasoning_effort)
    generate = fields.add_generation_prompt is not False

    def rendered() -> list[int]:
        turns = [message.plain(i) for i, message in enumerate(messages)]
        return tokenizer.chat(turns, generate, most, **more)

    return await off_loop(size, rendered)


def check_length(
    prompts: Sequence[Prompt], sampling: SamplingParams, limit: int, param: str, field: str
) -> None:
    """RequestError unless every prompt and the answer asked for fit in `limit` tokens.

    `param` names the request field that holds the prompt, `field` the one that limits the answer.
    """
    answers = len(prompts) * sampling.n
    if answers > MAX_ANSWERS:
        raise RequestError(
            f"one request may ask for at most {MAX_ANSWERS} answers, but {len(prompts)} prompts "
            f"with n={sampling.n} ask for {answers}",
            param=param,
        )
    for prompt in prompts:
        size = len(prompt.ids)
        if size == 0:
            raise RequestError("the prompt has no tokens", param=param)
        _fits(size, limit, param)
        if sampling.max_tokens is not None and size + sampling.max_tokens > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens, but you asked for "
                f"{size + sampling.max_tokens} tokens ({size} in the prompt, "
                f"{sampling.max_tokens} for the answer); lower {field} to at most {limit - size}",
                param=field,
                code="context_length_exceeded",
            )
        if sampling.max_tokens is None and size + sampling.min_tokens > limit:
            raise RequestError(
                f"min_tokens must be at most {limit - size} for this prompt, got "
                f"{sampling.min_tokens}",
                param="min_tokens",
            )


def _fits(size: int, limit: int, param: str) -> None:
    if size >= limit:
        raise RequestError(
            f"this model's maximum context length is {limit} tokens, but the prompt has "
            f"{size} tokens and leaves no room for an answer",
            param=param,
            code="context_length_exceeded",
        )


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread when `size` is more than a few thousand characters, bytes or tokens."""
    return work() if size <= _INLINE else await asyncio.to_thread(work)
