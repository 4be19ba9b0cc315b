"""The embedded model behind the real server, through the official openai client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from helpers.served import Served, served

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(MODEL, "--max-model-len=1024", "--kv-cache-memory=256MiB") as running:
        yield running


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models_say_what_is_served(server: Served, client: openai.OpenAI) -> None:
    card = client.models.list().data[0]
    assert card.id == MODEL
    fingerprint = card.model_dump()["fingerprint"]
    assert fingerprint["family"] == "llama"
    assert fingerprint["dtype"] == "float32"
    assert card.model_dump()["max_model_len"] == 1024
    assert server.log().count("fingerprint") >= 1


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40
    )
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    parts = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, stream=True
    )
    joined = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert joined == text


def test_second_time_comes_from_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = "The history of computing begins long before the first machines. " * 8
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage is not None
    details = again.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == (again.usage.prompt_tokens - 1) // 16 * 16
    salted = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0, extra_body={"cache_salt": "b"}
    )
    assert salted.usage is not None
    assert salted.usage.prompt_tokens_details is not None
    assert not salted.usage.prompt_tokens_details.cached_tokens
    assert salted.choices[0].text == first.choices[0].text


def test_stop_string_and_logprobs(client: openai.OpenAI) -> None:
    free = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=16, temperature=0, logprobs=2
    )
    choice = free.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    stop = choice.text[6:12]
    cut = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=16, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == choice.text[: choice.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_seed_and_n(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="My favourite food is", max_tokens=12, n=3, seed=3, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    texts = ask()
    assert len(set(texts)) == 3
    assert ask() == texts


def test_tokenize_round_trip(server: Served) -> None:
    text = "Bonjour, naïve café — 東京 🚀"
    sent = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}).json()
    back = httpx.post(
        f"{server.url}/detokenize", json={"model": MODEL, "tokens": sent["tokens"]}
    ).json()
    assert back["prompt"] == text


def test_bad_requests_are_explained(server: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="word " * 3000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="100000"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    bad = httpx.post(f"{server.url}/v1/completions", content=b'{"model": "\xff"}')
    assert bad.status_code == 400
    assert bad.json()["error"]["message"]


def test_metrics_count_tokens(server: Served, client: openai.OpenAI) -> None:
    before = server.metric("generation_tokens_total")
    client.completions.create(
        model=MODEL, prompt="Count", max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert server.metric("generation_tokens_total") == before + 9
