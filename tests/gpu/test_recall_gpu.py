"""A reference model on the card in BF16 answers what it answers on a CPU in float32."""

from __future__ import annotations

from typing import Any

import pytest

from baton import LLM
from baton.evals.text import prose
from helpers.recall import RECORDS, answer, digest, folder, recorded

#: Nats between the two likeliest tokens, in float32, from which BF16 may not change the choice.
#: BF16 on a CPU moved this margin of recall-rope by less than 0.3 for 99 of 100 tokens, and by 0.46
#: at most.
CLEAR = 1.0
NAMES = sorted(path.stem for path in RECORDS.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 192, "max_num_seqs": 5},
        {"enforce_eager": True},
        {"mtp": True},
    ],
    ids=["graphs", "small chunks", "eager", "with MTP"],
)
def test_answers_equal_the_cpu_s(name: str, options: dict[str, Any]) -> None:
    """Tokens are compared one after the other, up to the first of an answer whose margin on the CPU
    is not clear: behind it the two may rightly go on differently. Most tokens must be compared."""
    kept = recorded(name)
    assert kept.digest == digest(kept.suite), "the questions are not those that were recorded"
    base = {"dtype": "bfloat16", "max_model_len": 16384, "num_kv_pages": 2048}
    with LLM(str(folder(name)), **(base | options)) as llm:
        found = answer(llm, kept.suite)
    compared, wrong, moved = 0, [], []
    for mine, its in zip(found, kept.answers, strict=True):
        rows = zip(mine.tokens, its.tokens, mine.margins, its.margins, strict=True)
        for place, (token, expected, margin, clear) in enumerate(rows):
            if clear < CLEAR:
                break
            compared += 1
            if token != expected:
                wrong.append((its.task, place, clear, margin))
                break
            moved.append(abs(margin - clear))
    total = sum(len(its.tokens) for its in kept.answers)
    print(f"{name}: {compared} of {total} tokens compared, margins moved by {max(moved):.2f} nats")
    assert not wrong, "(task, token, margin on the CPU, margin here)"
    assert compared > 0.9 * total


@pytest.mark.parametrize("name", NAMES)
def test_the_mtp_module_guesses_what_it_guesses_on_a_cpu(name: str) -> None:
    tokens = prose("evaluation", 7, 2000).tolist()
    base = {"max_model_len": 4096, "num_kv_pages": 256, "mtp": True, "max_num_batched_tokens": 512}
    found = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        with LLM(str(folder(name)), device=device, dtype=dtype, **base) as llm:
            found.append(llm.examine([(tokens, 0)])[0].drafts[:-1])
    share = (found[0] == found[1]).float().mean().item()
    print(f"{name}: {share:.2%} of {len(found[0])} guesses are the same")
    assert share > 0.97
