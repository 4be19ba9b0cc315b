"""/v1/chat/completions through the official client, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from helpers.serving import Running

HI: list[Any] = [{"role": "user", "content": "hi"}]


def test_whole(server: Running) -> None:
    made = server.client.chat.completions.create(model="fake", messages=HI, max_tokens=4)
    assert made.choices[0].message.content == "user"
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason == "length"
    assert made.object == "chat.completion"
    assert made.usage is not None
    assert made.usage.prompt_tokens == len("user: hi\nassistant: ") + 1
    assert made._request_id == made.id


def test_async_client(server: Running) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(
                model="fake", messages=HI, max_completion_tokens=4, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(main()) == "user"


def test_stream_shape(server: Running) -> None:
    stream = server.client.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    first, *middle, usage = list(stream)
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [c.choices[0].delta.role for c in middle] == [None] * 3
    assert "".join(c.choices[0].delta.content or "" for c in middle) == "use"
    assert [c.choices[0].finish_reason for c in middle] == [None, None, "length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 3


def test_raw_event_stream(server: Running) -> None:
    body = {"model": "fake", "messages": HI, "max_tokens": 2, "stream": True}
    answer = server.post("/v1/chat/completions", **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert "usage" not in events[0]


def test_several_answers(server: Running) -> None:
    stream = server.client.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, n=3, stream=True
    )
    texts, roles = dict.fromkeys(range(3), ""), []
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        roles += [chunk.choices[0].index] if chunk.choices[0].delta.role else []
    assert list(texts.values()) == ["use", "ser", "er:"]
    assert roles == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Running, stream: bool) -> None:
    made = server.client.chat.completions.create(
        model="fake", messages=HI, max_tokens=2, logprobs=True, top_logprobs=2, stream=stream
    )
    parts = [chunk.choices[0].logprobs for chunk in (made if stream else [made])]  # type: ignore
    content = [entry for part in parts if part for entry in part.content or []]
    assert [entry.token for entry in content] == ["u", "s"]
    assert content[0].bytes == [117]
    assert content[0].logprob == -0.5
    assert [t.token for t in content[0].top_logprobs] == ["u", "v"]


def test_logprobs_without_top(server: Running) -> None:
    made = server.client.chat.completions.create(
        model="fake", messages=HI, max_tokens=1, logprobs=True
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs == []


def test_logprob_bytes_join_to_characters(server: Running) -> None:
    made = server.client.chat.completions.create(
        model="fake", messages=[{"role": "é", "content": ""}], max_tokens=2, logprobs=True
    )  # type: ignore
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    joined = bytes(b for entry in logprobs.content or [] for b in entry.bytes or [])
    assert joined.decode() == "é"


def test_content_parts_and_template_options(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": parts, "name": "me"}],
        max_tokens=1,
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    ).raise_for_status()
    assert server.engine.tokenizer is not None
    assert server.engine.tokenizer.decode(server.engine.seen[0][0]) == "user: a\nb\n"
    kwargs = server.engine.tokenizer.chat_kwargs
    assert kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_harmless_fields_are_taken(server: Running) -> None:
    server.post(
        "/v1/chat/completions",
        messages=HI,
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        metadata={"a": "b"},
        parallel_tool_calls=True,
    ).raise_for_status()


def test_token_ids(server: Running) -> None:
    body: dict[str, Any] = {"messages": HI, "max_tokens": 2, "return_token_ids": True}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["token_ids"] == [117, 115]
    assert choice["prompt_token_ids"][0] == 256
