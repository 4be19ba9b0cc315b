"""What a caller of `LLM` can ask for, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from baton import LLM, SamplingParams
from baton.core.errors import ConfigError, FingerprintMismatch, RequestError

BASE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "num_kv_pages": 128,
    "max_num_batched_tokens": 24,
    "skip_tokenizer_init": True,
    "threads": 1,
}
PROMPT = [5, 17, 200, 33, 9, 61, 250, 4, 88, 120, 7, 7, 19, 301, 42]


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], str]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **BASE) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(tiny: Callable[[str], str]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)


def logprobs_of(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "hy_v3", "deepseek_v3"])
def test_score_is_transformers_distribution(tiny: Callable[[str], str], family: str) -> None:
    ids = [(i * 37 + 11) % 317 + 3 for i in range(90)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32)
    expected = logprobs_of(model, ids)[:-1]
    for chunk in (1, 24, 256):
        with LLM(tiny(family), **(BASE | {"max_num_batched_tokens": chunk})) as engine:
            scores = engine.score(ids)
        assert scores.shape == expected.shape
        error = (scores - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() <= 1e-4, (chunk, float(error.max()))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_scores_from_a_position_on_share_what_is_cached(
    tiny: Callable[[str], str], family: str
) -> None:
    shared = [(i * 37 + 11) % 317 + 3 for i in range(70)]
    ends = [[(i * 13 + k) % 317 + 3 for i in range(8 + k)] for k in range(5)]
    prompts = [(shared + end, 60 + 3 * k) for k, end in enumerate(ends)]
    with LLM(tiny(family), **(BASE | {"max_num_batched_tokens": 24})) as engine:
        expected = [engine.score(ids)[start:] for ids, start in prompts]
        before = engine.stats().computed_tokens
        found = engine.score_all(prompts)
        computed = engine.stats().computed_tokens - before
    for mine, its in zip(found, expected, strict=True):
        assert mine.shape == its.shape
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=0)
    assert computed < sum(len(ids) - start + 16 for ids, start in prompts), "nothing was cached"


def test_logprobs_of_generated_and_prompt_tokens(llm: LLM, reference: Any) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    out = llm.generate([PROMPT], params)[0]
    answer = out.completions[0]
    expected = logprobs_of(reference, PROMPT + answer.token_ids)
    assert out.prompt_logprobs is not None
    assert answer.logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(PROMPT)
    for i, entry in enumerate(out.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.chosen.token_id == PROMPT[i]
        assert entry.chosen.logprob == pytest.approx(float(expected[i - 1, PROMPT[i]]), abs=1e-3)
        rank = int((expected[i - 1] > expected[i - 1, PROMPT[i]]).sum()) + 1
        assert entry.chosen.rank == rank
        assert len(entry.top) == 2
    for i, position in enumerate(answer.logprobs):
        row = expected[len(PROMPT) - 1 + i]
        best = row.topk(3)
        assert [t.token_id for t in position.top] == best.indices.tolist()
        assert position.chosen.token_id == answer.token_ids[i]
        assert position.chosen.rank == 1
        values = [t.logprob for t in position.top]
        assert values == pytest.approx(best.values.tolist(), abs=1e-3)


def test_prompt_logprobs_ignore_the_prefix_cache(llm: LLM) -> None:
    prompt = PROMPT * 4
    first = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))[0]
    again = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))[0]
    assert again.cached_tokens == 48
    asked = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))[
        0
    ]
    assert asked.cached_tokens == 0
    assert asked.prompt_logprobs is not None
    assert len(asked.prompt_logprobs) == len(prompt)
    assert first.completions[0].token_ids == asked.completions[0].token_ids


def test_n_answers_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    out = llm.generate([PROMPT], params)[0]
    tokens = [tuple(c.token_ids) for c in out.completions]
    assert [c.index for c in out.completions] == [0, 1, 2]
    assert len(set(tokens)) == 3
    again = llm.generate([PROMPT], params)[0]
    assert [tuple(c.token_ids) for c in again.completions] == tokens


def test_stop_tokens_and_lengths(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = llm.generate([PROMPT], free)[0].completions[0].token_ids
    assert len(tokens) == 12
    target = tokens[4]
    at = tokens.index(target)
    stopping = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[target]
    )
    stopped = llm.generate([PROMPT], stopping)[0].completions[0]
    assert stopped.token_ids == tokens[: at + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == target
    later = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=9, ignore_eos=True, stop_token_ids=[target]
    )
    assert len(llm.generate([PROMPT], later)[0].completions[0].token_ids) >= 9


def test_length_limit_of_the_model(llm: LLM) -> None:
    prompt = [3 + i % 300 for i in range(250)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].completions[0]
    assert len(answer.token_ids) == 6
    assert answer.finish_reason == "length"


def test_bias_forces_and_forbids(llm: LLM) -> None:
    forced = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={77: 100.0})
    assert llm.generate([PROMPT], forced)[0].completions[0].token_ids == [77, 77, 77]


def test_repetition_penalty_matches_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.3)
    ours = llm.generate([PROMPT], params)[0].completions[0].token_ids
    theirs = reference.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        repetition_penalty=1.3,
        max_new_tokens=16,
        min_new_tokens=16,
        eos_token_id=None,
    )[0, len(PROMPT) :].tolist()
    assert ours == theirs


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([], SamplingParams(), "empty"),
        ([3] * 256, SamplingParams(), "256"),
        ([3, 320], SamplingParams(), "320"),
        ([3, -1], SamplingParams(), "-1"),
        ([3], SamplingParams(temperature=-1), "temperature"),
        ([3], SamplingParams(top_p=0), "top_p"),
        ([3], SamplingParams(max_tokens=0), "max_tokens"),
        ([3], SamplingParams(logit_bias={999: 1.0}), "999"),
        ([3], SamplingParams(temperature=math.nan), "temperature"),
        ("text", SamplingParams(), "tokenizer"),
        ([3], SamplingParams(stop=["x"]), "tokenizer"),
    ],
)
def test_refusals_name_the_problem(
    llm: LLM, prompt: Any, params: SamplingParams, word: str
) -> None:
    with pytest.raises(RequestError, match=word):
        llm.generate([prompt], params)
    # The engine goes on.
    assert llm.generate([PROMPT], SamplingParams(max_tokens=1))[0].finished


def test_a_list_may_be_longer_than_the_queue(tiny: Callable[[str], str]) -> None:
    limits = {"max_num_queued_reqs": 4, "max_num_queued_tokens": 8}
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=2, ignore_eos=True)
    with LLM(tiny("llama"), **BASE, **limits) as engine:
        outputs = engine.generate([[5, 6, 7]] * 6, params)
        assert [len(o.completions) for o in outputs] == [3] * 6
        with pytest.raises(RequestError, match="empty"):
            engine.generate([[5], []], params)
        assert engine.stats().generation_tokens == 6 * 3 * 2, "something ran before the refusal"
        assert not engine.core.has_work()


def test_unknown_option_is_named(tiny: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        LLM(tiny("llama"), no_such_option=1)


def test_scores_of_a_request_that_fails_are_dropped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.score(PROMPT)
    commit, commits = llm.core.scheduler.commit, 0

    def fail(result: Any) -> Any:
        nonlocal commits
        commits += 1
        outputs = commit(result)
        if commits == 1:
            raise ValueError("broken on purpose")
        return outputs

    monkeypatch.setattr(llm.core.scheduler, "commit", fail)
    with pytest.raises(ValueError, match="on purpose"):
        llm.score(PROMPT)
    assert llm.core.scores == {}
    assert torch.equal(llm.score(PROMPT), expected)


def test_another_fingerprint_is_refused_before_loading(
    llm: LLM, tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = llm.fingerprint
    with LLM(tiny("llama"), **BASE, expect_fingerprint=ours.digest) as again:
        assert again.fingerprint == ours
    monkeypatch.setattr("baton.engine.build._load", lambda *_, **__: pytest.fail("loads first"))
    for expected in ("0" * 16, json.dumps(ours.to_dict() | {"weights": "others"})):
        with pytest.raises(FingerprintMismatch):
            LLM(tiny("llama"), **BASE, expect_fingerprint=expected)


def test_score_needs_two_tokens(llm: LLM) -> None:
    with pytest.raises(RequestError, match="two tokens"):
        llm.score([3])


def test_dummy_weights_need_only_a_config(tiny: Callable[[str], str], tmp_path: Any) -> None:
    import pathlib
    import shutil

    shutil.copy(pathlib.Path(tiny("deepseek_v3")) / "config.json", tmp_path)
    options = BASE | {"load_format": "dummy"}
    with LLM(str(tmp_path), **options) as engine:
        first = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
    with LLM(str(tmp_path), **options) as engine:
        again = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
    assert first[0].completions[0].token_ids == again[0].completions[0].token_ids
