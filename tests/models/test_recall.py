"""The reference models in the repository: transformers' logits, and one answer however they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.engine.llm import LLM
from baton.evals.exam import Suite
from baton.evals.marks import Marks
from helpers.forward import Driver, load_folder, relative_error
from helpers.recall import OPTIONS, SUITE, answer, digest, exams, folder, recorded

ROPE = folder("recall-rope")
LENGTH = 1024
NAMES = ["recall-rope", "recall-512k"]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """A context full of facts, and a question: what the model was trained for."""
    exam = Suite("marks", ("multikey2",), (LENGTH,), 1, 1).exam(Marks(128, 0), "multikey2", 1024, 0)
    return exam.tokens + exam.queries[0].tokens


@pytest.fixture(scope="module")
def expected(ids: list[int]) -> torch.Tensor:
    """`[T, vocab]`, by transformers' `deepseek_v3`."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(ROPE, dtype=torch.float32)
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    with torch.inference_mode():
        logits: torch.Tensor = theirs(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("chunks", [[LENGTH], [300, 1, 7, 500], [64] * 12])
@torch.inference_mode()
def test_logits_equal_transformers(
    ids: list[int], expected: torch.Tensor, chunks: list[int]
) -> None:
    """To 1e-4 of the largest logit, the bound for random models, and the same token everywhere
    that a rounding cannot turn."""
    driver = Driver(load_folder(ROPE), num_pages=80, page_size=16)
    found = driver.run("a", ids, chunks)
    assert relative_error(found, expected) <= 1e-4
    top = expected.topk(2, dim=1).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert clear.float().mean() > 0.9
    assert (found.argmax(1) == expected.argmax(1))[clear].all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "lengths, options",
    [
        (2, {"max_num_batched_tokens": 96, "max_num_seqs": 3}),
        (2, {"max_num_batched_tokens": 4096, "max_num_seqs": 64, "block_size": 64}),
        (1, {"enable_prefix_caching": False, "max_num_batched_tokens": 1000}),
    ],
)
def test_answers_are_the_recorded_ones(name: str, lengths: int, options: dict[str, Any]) -> None:
    """To the last token, and margins to float32's rounding, whatever the chunks, batches, pages and
    cache."""
    short = replace(SUITE, lengths=SUITE.lengths[:lengths])
    with LLM(str(folder(name)), dtype="float32", **(OPTIONS | options)) as llm:
        found = answer(llm, short)
    for mine, its in zip(found, recorded(name).answers, strict=False):
        assert mine.task == its.task
        assert mine.tokens == its.tokens, mine.task
        assert mine.margins == pytest.approx(its.margins, abs=5e-3), mine.task


@pytest.mark.parametrize("name", NAMES)
def test_recorded_answers_are_right_and_to_these_questions(name: str) -> None:
    """A record of nonsense, or of other questions, would show nothing."""
    kept = recorded(name)
    assert kept.suite == SUITE
    assert kept.digest == digest(SUITE), "the questions have changed: record the answers anew"
    right = [query.tokens[query.spans[0][0] :] for exam in exams(SUITE) for query in exam.queries]
    plain = ("single", "multikey1", "multikey2", "multivalue", "tracking", "chain", "boundary")
    pairs = zip(kept.answers, right, strict=True)
    hits = [given.tokens == wanted for given, wanted in pairs if given.task in plain]
    assert len(hits) > 70
    assert sum(hits) / len(hits) > 0.97
