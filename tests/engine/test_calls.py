"""Values of wrong kinds given to the offline API are refused by name, whatever they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton import LLM, SamplingParams
from baton.config.options import EngineOptions
from baton.core.errors import ConfigError, RequestError

BASE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "num_kv_pages": 64,
    "skip_tokenizer_init": True,
    "threads": 1,
}
ONE = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], str]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **BASE) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([[5, 1.5]], r"prompts\[0\]\[1\] .*1\.5 \(float\)"),
        ([[5], [5, 2.0]], r"prompts\[1\]\[1\]"),
        ([[True]], r"prompts\[0\]\[0\] .*bool"),
        ([[None]], r"prompts\[0\]\[0\]"),
        ([["a"]], r"prompts\[0\]\[0\]"),
        ([[object()]], r"prompts\[0\]\[0\]"),
        ([[math.nan]], r"prompts\[0\]\[0\]"),
        ([[2**70]], str(2**70)),
        ([[-(2**70)]], str(-(2**70))),
        ([np.array([5.0])], r"prompts\[0\]\[0\]"),
        ([np.array(5), [5]], r"prompts\[0\]"),
        ([torch.tensor(5), [5]], r"prompts\[0\]"),
        ([torch.tensor(5), torch.tensor(1.5)], r"prompts\[1\] .*1\.5"),
        ([np.array(5), np.array(1.5)], r"prompts\[1\] .*1\.5"),
        (list(torch.tensor([True])), r"prompts\[0\]"),
        (list(np.array([True])), r"prompts\[0\]"),
        ([torch.tensor([True])], r"prompts\[0\]\[0\]"),
        ([[torch.tensor(True)]], r"prompts\[0\]\[0\]"),
        (torch.tensor(5), "prompts must be"),
        ([{5: 6}, [5]], r"prompts\[0\]"),
        ([{5, 6}, [5]], r"prompts\[0\]"),
        ([b"ab", [5]], r"prompts\[0\]"),
        ([5, [6]], r"prompts\[0\]"),
        ([5, 6.0], r"prompts\[1\]"),
        ([True, False], r"prompts\[0\]"),
        (None, "prompts must be"),
        (5, "prompts must be"),
        ({"prompt": [5]}, "prompts must be"),
        (b"ab", "prompts must be"),
    ],
)
def test_prompts_of_wrong_kinds(llm: LLM, prompts: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate(prompts, ONE)
    assert not llm.core.has_work()


class Seven:
    def __index__(self) -> int:
        return 7


def test_integers_of_other_libraries_are_token_ids(llm: LLM) -> None:
    expected = llm.generate([[5, 6, 7]], ONE)[0].completions[0].token_ids
    several: list[Any] = [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), range(5, 8), (5, 6, 7)]
    several += [list(several[0]), list(several[1]), [np.array(5), torch.tensor(6), Seven()]]
    for given in several:
        for prompts in (given, [given], [[np.int64(5), *given[1:]]]):
            output = llm.generate(prompts, ONE)[0]
            assert output.completions[0].token_ids == expected
            assert output.prompt_token_ids == [5, 6, 7]
            assert set(map(type, output.prompt_token_ids)) == {int}


WRONG: dict[str, list[Any]] = {
    "n": ["2", 1.0, True, None],
    "max_tokens": ["5", 2.0, True],
    "min_tokens": [1.5, None],
    "temperature": ["hot", None, True, [1]],
    "top_k": [2.5, None],
    "top_p": ["1", None],
    "min_p": [None],
    "repetition_penalty": ["1"],
    "presence_penalty": [None],
    "frequency_penalty": ["a"],
    "logit_bias": [[1], {"5": 1.0}, {5: "a"}, {5.0: 1.0}, {True: 1.0}, {2**70: 1.0}, 5],
    "seed": [1.5, "a", 2**70],
    "stop": ["x", None, [5], [None]],
    "stop_token_ids": [None, ["a"], [1.5], [True]],
    "logprobs": [1.5, "a", True],
    "prompt_logprobs": [1.5],
    "ignore_eos": ["no", None, 1],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [0],
}


def test_every_sampling_option_is_checked(llm: LLM) -> None:
    assert set(WRONG) == set(SamplingParams.__struct_fields__)
    for field, values in WRONG.items():
        for value in values:
            with pytest.raises(RequestError, match=field) as caught:
                llm.generate([[5, 6]], SamplingParams(**{field: value}))
            assert caught.value.param == field
    assert not llm.core.has_work()


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({}, "sampling must be"),
        ({"temperature": 0}, "sampling must be"),
        (5, "sampling must be"),
        ("greedy", "sampling must be"),
        ([{}], r"sampling\[0\]"),
        ([None], r"sampling\[0\]"),
        ([ONE, ONE], "2 sampling params for 1"),
    ],
)
def test_sampling_of_wrong_kinds(llm: LLM, sampling: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate([[5, 6]], sampling)


@pytest.mark.parametrize(
    "more",
    [{"cache_salt": 5}, {"cache_salt": None}, {"cache_salt": "\ud800"}, {"progress": 5}],
)
def test_the_rest_of_generate(llm: LLM, more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(more))):
        llm.generate([[5] * 40], ONE, **more)


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([([5, 6.0], 0)], r"token_ids\[1\]"),
        ([([5, True], 0)], r"token_ids\[1\]"),
        ([([5, 2**70], 0)], str(2**70)),
        ([("text", 0)], "token_ids"),
        ([([5, 6], "a")], "start"),
        ([([5, 6], 0.0)], "start"),
        ([([5, 6], False)], "start"),
        ([5], r"prompts\[0\]"),
        ([([5, 6], 0, 0)], r"prompts\[0\]"),
        (None, "prompts"),
    ],
)
def test_scores_of_wrong_kinds(llm: LLM, prompts: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.score_all(prompts)
    assert llm.core.scores == {}


def test_chats_of_wrong_kinds() -> None:
    say: Any = [{"role": "user", "content": "x"}]
    with LLM("smollm2-135m", load_format="dummy", max_model_len=64, num_kv_pages=16) as llm:
        for messages in (None, 5, "hi", say[0], ["a"], [{"role": 5}]):
            with pytest.raises(RequestError, match="messages"):
                llm.chat(messages)
        for sampling in ({}, 5):
            with pytest.raises(RequestError, match="sampling"):
                llm.chat(say, sampling)


def test_models_and_options_of_wrong_kinds(tiny: Callable[[str], str]) -> None:
    folder = tiny("llama")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (5, {}, "model"),
        (None, {}, "model"),
        (folder, {"max_model_len": "many"}, "max_model_len: expected int"),
        (folder, {"threads": 2.5}, "threads"),
        (folder, {"block_size": True}, "block_size"),
        (folder, {"dtype": 5}, "dtype"),
        (folder, {"dtype": Path("float32")}, "dtype"),
        (folder, {"tokenizer": 5}, "tokenizer"),
        (folder, {"expect_fingerprint": 5}, "expect_fingerprint: expected str, got int"),
        (EngineOptions.of(folder), {"threads": 1}, "threads"),
    ]
    for model, options, named in wrong:
        with pytest.raises(ConfigError, match=named):
            LLM(model, **options)
    with LLM(Path(folder), **BASE) as llm:
        assert llm.generate([[5]], ONE)[0].finished


def test_files_may_be_path_objects(tiny: Callable[[str], str], tmp_path: Path) -> None:
    folder, expected = Path(tiny("llama")), tmp_path / "fingerprint.json"
    tokenizer = Path(__file__).parents[2] / "models" / "recall-rope"
    options = BASE | {"skip_tokenizer_init": False, "tokenizer": tokenizer}
    with LLM(folder, **options) as llm:
        assert llm.tokenizer is not None
        assert llm.options.model.tokenizer == str(tokenizer)
        expected.write_text(json.dumps(llm.fingerprint.to_dict()))
    with LLM(EngineOptions.of(folder, **options, expect_fingerprint=expected)) as llm:
        assert llm.options.expect_fingerprint == str(expected)


def test_progress_may_end_a_call(llm: LLM) -> None:
    def progress(finished: int, total: int) -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        llm.generate([[5, 6]] * 3, ONE, progress=progress)
    assert not llm.core.has_work()
    assert llm.generate([[5, 6]], ONE)[0].finished
