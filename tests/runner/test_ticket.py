"""A step's result may be waited for in pieces, and is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.runner.stopwatch import Stopwatch

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "num_kv_pages": 32, "threads": 1,
    "skip_tokenizer_init": True,
}  # fmt: skip


def test_a_device_that_is_not_through_is_asked_again(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with LLM(tiny("llama"), **OPTIONS) as llm:
        expected = llm.generate([[5, 6]], sampling)[0].completions[0].token_ids
        runner, seconds, asked = llm.core.executor.runner, Stopwatch.seconds, [0, 0]

        def slow(watch: Stopwatch, timeout: float | None = None) -> float:
            asked[0] += 1
            if asked[0] % 3:
                raise TimeoutError
            return seconds(watch, timeout)

        def patient(ticket: Any) -> Any:
            while True:
                try:
                    found = runner.collect(ticket, 0.5)
                except TimeoutError:
                    asked[1] += 1
                    continue
                with pytest.raises(AssertionError, match="twice"):
                    runner.collect(ticket)
                return found

        monkeypatch.setattr(Stopwatch, "seconds", slow)
        monkeypatch.setattr(llm.core.executor, "collect", patient)
        again = llm.generate([[5, 6]], sampling)[0].completions[0].token_ids
    assert again == expected
    assert asked[1] >= 10, "two refusals for each step"
