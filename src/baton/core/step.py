"""What the scheduler tells the runner to do in one step, and what comes back.

The host names slots, pages and how many tokens to run. The device owns the truth: last sampled
tokens and lengths live in its slots, so a plan for step N+1 can be made before step N is read.
A plan travels to every rank as msgspec bytes; all ranks run the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.request import PositionLogprobs
from baton.core.sampling import SamplingParams


class Admit(msgspec.Struct, array_like=True):
    """A request takes a device slot (on arrival or after preemption) before this step runs.

    `seed` is always set (drawn on the host if the user gave none), so that every rank draws the
    same sample. `tokens` = prompt + outputs so far, only when `sampling.penalised`; `num_prompt`
    and `num_output` are their counts now. `stop_ids` are the ids that `min_tokens` holds back.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    num_prompt: int
    num_output: int
    tokens: list[int]
    stop_ids: list[int]


class Row(msgspec.Struct, array_like=True):
    """Tokens `[start, start + length)` of the request in `slot`.

    `tokens` are their `ids` where the host knows them, as bytes since these cross processes and are
    copied to the device whole; empty means `length == 1` and the id is the slot's last sampled
    token, on the device. `pages` are appended to the slot's page table before the step, so the
    table then covers `start + length` tokens. `sample`: the last position yields a token. `score`:
    return log-probability rows for the tokens of this row from this one on (0: all), -1 for none.
    `prompt_logprobs`: top-k wanted at every position of this row, -1 for none.

    `layers`: this step computes only the layers `[first, last)` of the row; the steps behind it
    compute the rest, as rows of the same `start` and `length` without pages, of which the last has
    `ends` (and samples, if any does). At most one such chunk is under way at a time; one that
    begins drops one that did not end. None: all layers, in one pass with the other rows.
    """

    slot: int
    start: int
    length: int
    tokens: bytes
    pages: list[int]
    sample: bool
    score: int = -1
    prompt_logprobs: int = -1
    #: the id that follows the row's last token, -1 if unknown
    next_token: int = -1
    layers: tuple[int, int] | None = None
    ends: bool = True

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """What `tokens` holds, int64 `[length]` or `[0]`; read only."""
        return np.frombuffer(self.tokens, np.int64)


class StepPlan(msgspec.Struct, array_like=True):
    """One step for every rank. `release` frees slots *before* `admit` fills them again."""

    step: int
    release: list[int]
    admit: list[Admit]
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(row.length for row in self.rows)


class RowResult(msgspec.Struct, array_like=True):
    """What one row of the plan produced. `token` is -1 unless the row asked for a sample.

    `error` is set when this row alone went wrong (for example non-finite logits).
    """

    token: int = -1
    logprobs: PositionLogprobs | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Scores:
    """Of the `n` positions of a row from `score` on: log-probabilities of the token behind each,
    float32 `[n, vocab]`, and the MTP module's guesses at the token behind that one, int64 `[n]`, if
    it is loaded."""

    logprobs: Any
    drafts: Any = None


class StepResult(msgspec.Struct):
    """Results in the order of `StepPlan.rows`; `seconds` is the device time of the step.

    `scores[i]` are those of a row with `score` (in-process only).
    """

    step: int
    rows: list[RowResult]
    seconds: float
    scores: dict[int, Scores] = {}
