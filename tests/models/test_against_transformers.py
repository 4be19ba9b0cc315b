"""Logits of small random checkpoints against transformers, at every position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.forward import Driver, load_folder, relative_error
from helpers.zoo import CASES, TOKENS, expected_logits, random_model


@pytest.mark.parametrize("case", CASES)
def test_every_position(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    made = random_model(family, config)
    made.save_pretrained(tmp_path)
    driver = Driver(load_folder(tmp_path))
    theirs = expected_logits(made, TOKENS)
    for name, chunks in {"chunks": [7, 5, 1, 1, 4], "at once": [23], "decode": [1]}.items():
        assert relative_error(driver.run(name, TOKENS, chunks), theirs) <= 1e-4, (case, name)


@pytest.mark.parametrize("case", ["llama", "hy3", "deepseek3"])
def test_float64_agrees_to_many_digits_whatever_the_chunks(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    random_model(family, config).save_pretrained(tmp_path)
    driver = Driver(load_folder(tmp_path, "float64"), kv_dtype="float64", compute_dtype="float64")
    whole = driver.run("whole", TOKENS, [23])
    assert whole.dtype == torch.float64
    assert relative_error(driver.run("chunks", TOKENS, [7, 5, 1, 1, 4]), whole) <= 1e-12


@pytest.mark.parametrize("case", ["llama", "hy3", "deepseek3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_width_is_close_and_logits_are_wide(case: str, dtype: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    made = random_model(family, config)
    made.save_pretrained(tmp_path)
    driver = Driver(load_folder(tmp_path, dtype), kv_dtype=dtype, compute_dtype=dtype)
    logits = driver.run("a", TOKENS, [9, 5])
    assert logits.dtype == torch.float32
    gap = (logits - expected_logits(made, TOKENS)).norm() / logits.norm()
    assert gap < 0.2  # a flipped expert moves single positions; the whole must stay near


@pytest.mark.parametrize("case", ["llama", "qwen3 moe", "deepseek3"])
def test_a_mixed_batch_gives_each_sequence_its_own_logits(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    made = random_model(family, config)
    made.save_pretrained(tmp_path)
    driver = Driver(load_folder(tmp_path))
    prompts = {i: [(t * (i + 2)) % 97 for t in TOKENS] for i in range(4)}
    theirs = {i: expected_logits(made, tokens) for i, tokens in prompts.items()}
    done = dict.fromkeys(prompts, 0)
    for lens in [(9, 3, 1, 0), (1, 4, 1, 5), (1, 1, 1, 1), (1, 1, 7, 1), (2, 1, 1, 1)]:
        rows = {i: prompts[i][done[i] : done[i] + n] for i, n in enumerate(lens) if n}
        for i, logits in driver.step(rows).items():
            want = theirs[i][done[i] : done[i] + lens[i]]
            assert relative_error(logits, want) <= 1e-4
            done[i] += lens[i]
