"""What `recall-rope` must recall: plain facts always, and what is kept of a larger suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.llm import LLM
from baton.evals.compare import compare
from baton.evals.document import Document, load
from baton.evals.exam import Suite
from baton.evals.gates import check, read_gate
from baton.evals.marks import Marks
from baton.evals.run import run
from baton.evals.setup import texts_of
from baton.evals.subject import Engine

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "accuracy"
PLAIN = Suite("marks", ("single", "multikey1", "multikey2", "multikey3"), (2048,), 1, 24)


def examine(suite: Suite, text: Path | None = None, **options: Any) -> Document:
    names = [] if text is None else [str(text)]
    with LLM(str(ROOT / "models" / "recall-rope"), **options) as llm:
        texts = texts_of(suite, names, max(suite.lengths), llm.tokenizer)
        form, facts = Marks(suite.alphabet, suite.seed), ({"name": "test"}, {})
        return run(Engine(llm), form, suite, texts, facts, lambda *_: None)


def test_plain_facts_are_recalled_at_any_distance() -> None:
    found = examine(PLAIN, max_model_len=2304, num_kv_pages=1024, threads=1)
    assert len(found.answers) == 4 * 24
    wrong = [(answer.task, answer.distance) for answer in found.answers if not answer.hit]
    assert len(wrong) <= 1, wrong
    assert max(answer.distance for answer in found.answers) > 1900


@pytest.mark.slow
def test_kept_answers_hold_within_the_gate() -> None:
    """As `make accuracy` does, and a loss that the gate must see."""
    kept, gate = load(KEPT / "recall-rope.json"), read_gate(KEPT / "gate.toml")
    suite = msgspec.convert(kept.suite, Suite)
    found = examine(suite, ROOT / "LICENSE")
    assert check(compare(kept, found), gate) == []
    for answer in found.answers:
        answer.hit &= answer.task != "single"
    assert {breach.where for breach in check(compare(kept, found), gate)} == {"all", "task single"}
