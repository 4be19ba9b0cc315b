"""/v1/completions through the official client."""

from __future__ import annotations

import pytest

from helpers.serving import Running


def test_text_prompt(server: Running) -> None:
    server.engine.script.cached_tokens = 2
    made = server.client.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert made.choices[0].text == "abcab"
    assert made.choices[0].finish_reason == "length"
    assert made.object == "text_completion"
    assert made.id.startswith("cmpl-")
    assert made.system_fingerprint == "f1e2d3c4b5a69788"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (4, 5)
    assert made.usage.total_tokens == 9
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 2
    assert server.engine.seen[0][0] == [256, 97, 98, 99]


@pytest.mark.parametrize(
    "prompt, texts",
    [
        (["ab", "cd"], ["aba", "cdc"]),
        ([97, 98], ["aba"]),
        ([[97, 98], [99]], ["aba", "ccc"]),
    ],
)
def test_prompt_forms(server: Running, prompt: list, texts: list[str]) -> None:
    made = server.client.completions.create(model="fake", prompt=prompt, max_tokens=3)
    assert [c.text for c in made.choices] == texts
    assert [c.index for c in made.choices] == list(range(len(texts)))


def test_default_and_null_max_tokens(server: Running) -> None:
    made = server.client.completions.create(model="fake", prompt="x")
    assert made.usage is not None
    assert made.usage.completion_tokens == 16
    server.engine.script.delta = 512
    answer = server.post("/v1/completions", prompt="x", max_tokens=None).json()
    assert answer["usage"]["total_tokens"] == 4096


def test_n_with_several_prompts(server: Running) -> None:
    made = server.client.completions.create(
        model="fake", prompt=["ab", "cd"], n=2, max_tokens=2, extra_body={"best_of": 2}
    )
    assert [c.text for c in made.choices] == ["ab", "ba", "cd", "dc"]
    assert made.usage is not None
    assert made.usage.completion_tokens == 8
    stream = server.client.completions.create(
        model="fake", prompt=["ab", "cd"], n=2, max_tokens=2, stream=True
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == ["ab", "ba", "cd", "dc"]


def test_stream_with_usage(server: Running) -> None:
    stream = server.client.completions.create(
        model="alias",
        prompt="abc",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "abca"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 3 + ["length"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert {c.model for c in chunks} == {"alias"}
    assert len({c.id for c in chunks}) == 1


def test_continuous_usage(server: Running) -> None:
    stream = server.client.completions.create(
        model="fake",
        prompt="ab",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == [1, 2, 3, 3]


def test_logprobs(server: Running) -> None:
    made = server.client.completions.create(model="fake", prompt="abc", max_tokens=3, logprobs=5)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    top = logprobs.top_logprobs[0]
    assert top == {"a": -0.5, "b": -1.5, "c": -2.5, "d": -9999.0, "e": -9999.0}


def test_logprobs_zero_and_stream_offsets(server: Running) -> None:
    stream = server.client.completions.create(
        model="fake", prompt="ab", max_tokens=3, logprobs=0, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [p.text_offset for p in parts if p] == [[0], [1], [2]]
    assert [p.top_logprobs for p in parts if p] == [[{"a": -0.5}], [{"b": -0.5}], [{"a": -0.5}]]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: Running, stream: bool) -> None:
    made = server.client.completions.create(
        model="fake", prompt="ab", max_tokens=1, logprobs=1, echo=True, stream=stream
    )
    choices = [chunk.choices[0] for chunk in (made if stream else [made])]  # type: ignore
    assert "".join(c.text for c in choices) == "aba"
    logprobs = [c.logprobs for c in choices if c.logprobs]
    assert [t for p in logprobs for t in p.tokens] == ["<s>", "a", "b", "a"]
    assert [t for p in logprobs for t in p.token_logprobs] == [None, -0.5, -0.5, -0.5]
    assert [t for p in logprobs for t in p.text_offset] == [0, 3, 4, 5]
    assert choices[-1].finish_reason == "length"


def test_echo_of_ids(server: Running) -> None:
    made = server.client.completions.create(
        model="fake", prompt=[256, 104, 105], max_tokens=1, echo=True
    )
    assert made.choices[0].text == "hih"


def test_stop_and_sampling_options(server: Running) -> None:
    made = server.client.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=9,
        stop="c",
        seed=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"65": -10},
        user="someone",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [257],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "priority": 3,
            "cache_salt": "tenant",
            "nobody_knows_this": 1,
        },
    )
    assert made.choices[0].text == "ab"
    assert made.choices[0].finish_reason == "stop"
    assert made.choices[0].model_extra == {"stop_reason": "c"}
    _, sampling, more = server.engine.seen[0]
    assert more == {"priority": 3, "cache_salt": "tenant"}
    assert sampling.logit_bias == {65: -10}
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (5, 0.1, 7)
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.1, 1)
    assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.stop) == (True, [257], ["c"])
    assert (sampling.skip_special_tokens, sampling.include_stop_str_in_output) == (False, True)


def test_nulls_mean_defaults(server: Running) -> None:
    fields = "n temperature top_p seed stop logit_bias user stream stream_options best_of logprobs"
    answer = server.post("/v1/completions", prompt="x", **dict.fromkeys(fields.split()))
    assert answer.status_code == 200
    assert server.engine.seen[0][1].temperature == 1.0


def test_token_ids_and_prompt_logprobs(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True}
    choice = server.post("/v1/completions", prompt_logprobs=1, **body).json()["choices"][0]
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_token_ids"] == [256, 97, 98]
    assert choice["prompt_logprobs"][0] is None
    expected = {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    assert choice["prompt_logprobs"][1] == expected
    stream = server.client.completions.create(
        model="fake", prompt="ab", max_tokens=2, stream=True, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0].model_extra for chunk in stream]
    assert choices[0]["prompt_token_ids"] == [256, 97, 98]
    assert [i for c in choices for i in c["token_ids"]] == [97, 98]


def test_tokens_as_ids(server: Running) -> None:
    made = server.client.completions.create(
        model="fake",
        prompt="a",
        max_tokens=1,
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.tokens == ["token_id:97"]


def test_half_million_ids(server: Running) -> None:
    server.engine.max_model_len = 1 << 20
    try:
        made = server.post("/v1/completions", prompt=[97] * 524288, max_tokens=1)
    finally:
        server.engine.max_model_len = 4096
    assert made.json()["usage"]["prompt_tokens"] == 524288
