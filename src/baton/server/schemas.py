"""Request bodies: the OpenAI API and the extra fields that vLLM users know.

Types are strict (`"12"` is not a number). Fields nobody knows are ignored, as OpenAI's server
does; fields that are known but would change the answer in a way Baton cannot are refused by
name (`UNSUPPORTED`), never silently dropped. `null` always means "the default".
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from baton.core.errors import RequestError
from baton.core.sampling import SamplingParams

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"items": {"type": "string"}}]})
]
Ids = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


class StreamOptions(BaseModel):
    """What a stream carries besides tokens: usage at its end, or in every chunk."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """Fields that completions and chat completions share.

    model: a served name; may be left out.
    stream: answer with server-sent events.
    stream_options: `include_usage` ends a stream with a usage chunk, `continuous_usage_stats` adds
        it to every chunk.
    stop: a text, or texts, that end the answer.
    user: ignored.
    response_format: only `{"type": "text"}`.
    priority: lower is served first.
    cache_salt: prefixes are shared only between requests with the same one.
    return_token_ids: add the ids of prompt and answer.
    return_tokens_as_token_ids: name tokens `token_id:N` in log-probabilities.
    """

    model_config = ConfigDict(strict=True)
    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "use_beam_search",
        "truncate_prompt_tokens",
    )

    model: str | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int | None = None
    stop: Stop = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Int | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None

    def check(self) -> None:
        """Refuse what cannot be served and combinations that contradict one another."""
        for name in self.UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported", param=name, code="unsupported")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise RequestError(
                f"response_format of type {kind!r} is not supported, only 'text'",
                param="response_format",
                code="unsupported",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is not available with stream=true", param="prompt_logprobs"
            )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream carries usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def _sampling(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING} | more
        values = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias:
            values["logit_bias"] = _bias(self.logit_bias)
        return SamplingParams(max_tokens=max_tokens, stop=_stop(self.stop), **values)


_SAMPLING: tuple[str, ...] = ("n", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
_SAMPLING += ("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids")
_SAMPLING += ("include_stop_str_in_output", "skip_special_tokens", "min_tokens", "prompt_logprobs")


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`.

    prompt: a text, token ids, or a list of either.
    best_of: only the same as `n`.
    echo: begin the answer with the prompt.
    add_special_tokens: false: encode the prompt without the tokenizer's own additions.
    """

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (*GenerationRequest.UNSUPPORTED, "suffix")

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {"description": "a string, strings, token ids, or lists of token ids"},
        ),
    ] = None
    max_tokens: Int | None = 16
    best_of: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise RequestError(
                f"best_of must equal n ({n}), got {self.best_of}: ranking is not supported",
                param="best_of",
            )

    def sampling(self) -> SamplingParams:
        """Sampling options; `echo` with `logprobs` asks for the prompt's log-probabilities."""
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        return self._sampling(self.max_tokens, **more)


class ChatMessage(BaseModel):
    """One turn. Further fields (`name`, `tool_call_id`, ...) reach the template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Any = None

    def plain(self, position: int) -> dict[str, Any]:
        """The turn as a template sees it: text parts joined, everything else as it came."""
        fields = self.model_dump(exclude_none=True)
        fields["content"] = _content(self.content, f"messages[{position}].content")
        return fields


class TemplateFields(BaseModel):
    """How messages become a prompt; shared by chat completions and `/tokenize`.

    add_generation_prompt: false: do not open the assistant's turn.
    continue_final_message: go on with the last message instead of answering it.
    chat_template: used instead of the model's.
    chat_template_kwargs: passed to the template.
    reasoning_effort: passed to the template.
    """

    model_config = ConfigDict(strict=True)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatRequest(GenerationRequest, TemplateFields):
    """Body of `/v1/chat/completions`.

    messages: turns with `role` and `content` (a text, or parts of type `text`).
    max_completion_tokens: most tokens of an answer; all that fit when unset.
    max_tokens: older name of `max_completion_tokens`.
    logprobs: true: return log-probabilities.
    top_logprobs: how many of the likeliest tokens to add at each position.
    modalities: only `["text"]`.
    """

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        *GenerationRequest.UNSUPPORTED,
        "tools",
        "functions",
        "audio",
        "prediction",
        "web_search_options",
        "documents",
        "echo",
    )

    messages: list[ChatMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    echo: bool | None = None
    modalities: list[str] | None = None

    def check(self) -> None:
        super().check()
        if self.modalities not in (None, [], ["text"]):
            raise RequestError("only the text modality is supported", param="modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def sampling(self) -> SamplingParams:
        """Sampling options; `logprobs` true means the chosen token and `top_logprobs` others."""
        top = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(self.token_limit[1], logprobs=top)


class TokenizeRequest(TemplateFields):
    """Body of `/tokenize`: a prompt, or messages as for chat.

    model: a served name; may be left out.
    prompt: a text.
    messages: as for chat, instead of a prompt.
    add_special_tokens: false: encode the prompt without the tokenizer's own additions.
    return_token_strs: add the text of each token.
    """

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeRequest(BaseModel):
    """Body of `/detokenize`.

    model: a served name; may be left out.
    tokens: token ids.
    """

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: Ids


def _stop(value: Any) -> list[str]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("stop must be a string or a list of strings", param="stop")
    return texts


def _bias(value: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise RequestError("logit_bias keys must be token ids", param="logit_bias") from None


def _content(value: Any, path: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{path} must be a string or a list of parts", param=path)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f'{path}: only parts like {{"type": "text", "text": "..."}} are supported',
                param=path,
            )
        texts.append(part["text"])
    return "\n".join(texts)
