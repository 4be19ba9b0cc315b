"""The embedded model against transformers reading the same GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Explain photosynthesis to a child.",
    "Once upon a time, in a village by the river,",
    "What is 12 times 11?",
    "List three uses of a paperclip.",
    "The quick brown fox",
    "Translate to French: Good morning, my friend.",
    "import numpy as np\n\nx =",
    "Who wrote Romeo and Juliet?",
    "The three laws of motion are",
    "A recipe for pancakes: first,",
    "Dear Sir or Madam,",
    "In 1969, humans first",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "Summarise: The cat sat on the mat. The dog barked. The cat ran away.",
    "Why is the sky blue?",
    '{"name": "Alice", "age":',
]


@pytest.fixture(scope="module")
def smollm() -> Any:
    with LLM("smollm2-135m", max_model_len=1024, kv_cache_memory="512MiB") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(smollm: LLM) -> Any:
    path = Path(smollm.config.model_path)
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()


def test_greedy_tokens_equal_transformers(smollm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = smollm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            theirs = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=64,
                min_new_tokens=64,
                eos_token_id=None,
                pad_token_id=0,
            )[0, ids.shape[1] :].tolist()
        assert output.completions[0].token_ids == theirs, prompt


def test_chat_answers_a_question(smollm: LLM) -> None:
    output = smollm.chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        SamplingParams(temperature=0, max_tokens=40),
    )
    assert "Paris" in output.completions[0].text
    assert "<|im_end|>" not in output.completions[0].text


def test_stop_string_cuts_the_text(smollm: LLM) -> None:
    free = smollm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=24))[0]
    text = free.completions[0].text
    stop = text[8:14]
    cut = smollm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=24, stop=[stop]))
    assert cut[0].completions[0].text == text[: text.index(stop)]
    assert cut[0].completions[0].stop_reason == stop
    assert smollm.stats().kv_pages_used == 0
