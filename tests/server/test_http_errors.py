"""Bad input: every answer is an OpenAI error that names what is wrong."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from helpers.fake_engine import FakeEngine
from helpers.serving import Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'"text"', "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_bodies_that_are_not_json(server: Running, content: bytes, words: str) -> None:
    error = error_of(server.http.post(TEXT, content=content), 400)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", "12"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_tokens", 4096),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", 2),
        ("n", 0),
        ("n", 1000),
        ("seed", 2**64),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ""),
        ("logprobs", -1),
        ("logprobs", 1000),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"5000": 1}),
        ("logit_bias", [1]),
        ("stop_token_ids", [5000]),
        ("min_tokens", 17),
        ("priority", 2**60),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("suffix", "end"),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"regex": "a"}),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", {}),
        ("prompt", None),
        ("prompt", ["a", 1]),
        ("prompt", [1, True]),
        ("prompt", [1.5]),
        ("prompt", [300]),
        ("prompt", [-1]),
        ("prompt[0]", [[300]]),
        ("prompt[1]", [[1], ["a"]]),
        ("prompt", [[]]),
    ],
)
def test_wrong_values_name_the_field(server: Running, field: str, value: Any) -> None:
    body = {"prompt": "x", field.partition("[")[0]: value}
    error = error_of(server.post(TEXT, **body), 400)
    assert error["param"] is not None
    assert error["param"].split(".")[0] == field
    assert field.partition("[")[0] in error["message"]
    assert not server.engine.seen


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite(server: Running, literal: str) -> None:
    body = f'{{"prompt": "x", "temperature": {literal}}}'
    assert error_of(server.http.post(TEXT, content=body), 400)["param"] == "temperature"


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "logprobs": 2}, "logprobs"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HI, "max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"messages": HI, "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": HI, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"messages": HI, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_wrong_chat_bodies(server: Running, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post(CHAT, **body), 400)["param"] == param


def test_values_are_not_repeated(server: Running) -> None:
    answer = server.post(CHAT, messages=[{"role": ["secret-prompt"], "content": "x"}])
    error_of(answer, 400)
    assert "secret" not in answer.text


def test_unknown_model(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.chat.completions.create(model="gpt-9", messages=HI)  # type: ignore
    assert caught.value.code == "model_not_found"
    assert "fake" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-9")


@pytest.mark.parametrize("size, room", [(4096, 1), (5000, 1), (4090, 7)])
def test_context_length(server: Running, size: int, room: int) -> None:
    answer = server.post(TEXT, prompt=[97] * size, max_tokens=room)
    error = error_of(answer, 400)
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    assert str(size) in error["message"]
    exact = server.post(TEXT, prompt=[97] * 4090, max_tokens=6)
    assert exact.status_code == 200


def test_paths_and_methods(server: Running) -> None:
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    wrong = server.http.get(TEXT)
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_queue_full(server: Running) -> None:
    server.engine.script.queue_full = True
    answer = server.post(TEXT, prompt=["a", "b"])
    error = error_of(answer, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "3"
    with pytest.raises(openai.RateLimitError):
        server.client.completions.create(model="fake", prompt="x")


@pytest.mark.parametrize("state", ["starting", "unresponsive", "restarting", "draining", "dead"])
def test_unavailable(server: Running, state: Any) -> None:
    server.engine.state = state
    try:
        answer = server.post(TEXT, prompt="x")
        assert state in error_of(answer, 503)["message"]
        assert answer.headers["retry-after"]
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, state)
        assert server.http.get("/health/live").status_code == (503 if state == "dead" else 200)
    finally:
        server.engine.state = "ready"


def test_request_failed(server: Running) -> None:
    server.engine.script.fail_after = 2
    error = error_of(server.post(TEXT, prompt="abc"), 500)
    assert error["code"] == "request_failed"
    server.engine.script.fail_after = None
    assert server.post(TEXT, prompt="abc").status_code == 200


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_failure_in_a_stream(server: Running, path: str) -> None:
    server.engine.script.fail_after = 2
    body: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": ["a", "b"]}
    answer = server.post(path, stream=True, **body)
    events = answer.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_failed"
    assert "[DONE]" not in answer.text
    with pytest.raises(openai.APIError, match="finite"):
        list(server.client.chat.completions.create(model="fake", messages=HI, stream=True))  # type: ignore


def test_stream_that_ends_early_is_an_error(server: Running) -> None:
    server.engine.script.end_early_after = 2
    assert error_of(server.post(TEXT, prompt="abc"), 500)["code"] == "request_failed"


def test_internal_error_says_nothing_private(server: Running) -> None:
    server.engine.script.token_delay = "secret"  # type: ignore
    answer = server.post(TEXT, prompt="abc")
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "secret" not in answer.text


def test_no_tokenizer_and_no_template(server: Running) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = None
    try:
        assert "chat template" in error_of(server.post(CHAT, messages=HI), 400)["message"]
        server.engine.tokenizer = None
        for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": HI})):
            assert "no tokenizer" in error_of(server.post(path, **body), 400)["message"]
        echo = server.post(TEXT, prompt=[97], echo=True)
        assert "no tokenizer" in error_of(echo, 400)["message"]
        answer = server.post(TEXT, prompt=[97], max_tokens=2, return_token_ids=True)
        assert answer.json()["choices"][0]["token_ids"] == [97, 97]
    finally:
        tokenizer.chat_template = "fake"
        server.engine.tokenizer = tokenizer


def test_body_limit() -> None:
    with running(max_body="1KiB") as server:
        big = b'{"prompt": "' + b"x" * 2000 + b'"}'
        error = error_of(server.http.post(TEXT, content=big), 413)
        assert error["code"] == "request_too_large"
        chunked = server.http.post(TEXT, content=iter([big[:1000], big[1000:]]))
        error_of(chunked, 413)
        assert server.post(TEXT, prompt="x").status_code == 200


def test_huge_declared_body_is_refused_unread(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n"
        )
        assert raw.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    "more, param",
    [
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": [[1]] * 2049}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 128}, "prompt"),
        ({"prompt": "a", "stop": [f"s{i}" for i in range(1025)]}, "stop"),
        ({"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ],
)
def test_one_request_cannot_ask_for_any_number(
    server: Running, more: dict[str, Any], param: str
) -> None:
    error = error_of(server.http.post(TEXT, json={"max_tokens": 1, **more}), 400)
    assert error["param"] == param
    assert "at most" in error["message"]


def test_metrics_for_a_client_that_accepts_nonsense(server: Running) -> None:
    accept = "application/openmetrics-text; version=x; q=abc"
    answer = server.http.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert "baton:http_requests" in answer.text


def test_what_cannot_fit_is_told_to_the_tokenizer_and_ids_are_counted_first() -> None:
    engine = FakeEngine()
    with running(engine) as server:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        for path, body, most in (
            (TEXT, {"prompt": "a"}, 4095),
            (TEXT, {"prompt": ["a", "b"]}, 4095),
            (CHAT, {"messages": HI}, 4095),
            ("/tokenize", {"prompt": "a"}, 4096),
            ("/tokenize", {"messages": HI}, 4096),
        ):
            tokenizer.most_tokens = -1
            assert server.http.post(path, json=body).status_code == 200
            assert tokenizer.most_tokens == most, path
        for prompt in ([-1] * 4096, [1] * 4095 + ["a"], [[1], [-1] * 4096], [["a"], [1] * 4096]):
            error = error_of(server.http.post(TEXT, json={"prompt": prompt}), 400)
            assert error["code"] == "context_length_exceeded"
