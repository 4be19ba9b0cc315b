"""What one step sampled, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.request import PositionLogprobs, TokenLogprob
from baton.core.step import RowResult
from baton.ops.sample import TokenLogprobs

_NON_FINITE = "non-finite logits: the model gave NaN, infinity, or no token that may be chosen"


def position_logprobs(values: TokenLogprobs, ids: Tensor, k: list[int]) -> list[PositionLogprobs]:
    """Turn host tensors of `token_logprobs` into messages; `ids` `[N]` are the chosen tokens and
    `k[i]` how many of the best position i wants."""
    columns = (ids, values.chosen, values.rank, values.top_ids, values.top)
    chosen, logprob, rank, top_ids, top = (column.tolist() for column in columns)
    return [
        PositionLogprobs(
            TokenLogprob(chosen[i], logprob[i], rank[i]),
            [TokenLogprob(top_ids[i][j], top[i][j], j + 1) for j in range(min(k[i], len(top[i])))],
        )
        for i in range(len(chosen))
    ]


@dataclass(frozen=True)
class Sampled:
    """What one step sampled: `tokens` int64 `[S]` on the device, always valid ids.

    The `host*` tensors are copies under way, `host` int64 `[2, S]` of the tokens and of whether
    each row's logits were unusable; `ready` is the event after them (None on CPU).
    """

    tokens: Tensor
    host: Tensor
    host_logprobs: TokenLogprobs | None
    #: the rows that want log-probabilities, and how many of the best each wants
    logprob_rows: list[int]
    logprob_k: list[int]
    ready: torch.cuda.Event | None

    def to_host(self) -> list[RowResult]:
        """Wait for the copies; one result per row. A row with non-finite logits has `error`."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, unusable = self.host.tolist()
        results = [RowResult(token) for token in tokens]
        if self.host_logprobs is not None:
            chosen = self.host[0][self.logprob_rows]
            messages = position_logprobs(self.host_logprobs, chosen, self.logprob_k)
            for row, message in zip(self.logprob_rows, messages, strict=True):
                results[row].logprobs = message
        if any(unusable):
            for row, bad in enumerate(unusable):
                if bad:
                    results[row].error, results[row].logprobs = _NON_FINITE, None
        return results
