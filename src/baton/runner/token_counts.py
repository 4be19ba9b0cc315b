"""Which tokens penalised requests have seen: a dense table on the device, for those only."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.ops.host import upload


class TokenCounts:
    """Output counts (int32) and prompt presence (bool), one table row of `[vocab]` per slot.

    Rows exist only for slots that asked; the table doubles when it is full.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def row(self, slot: int) -> int:
        """The table row of an admitted slot."""
        return self._rows[slot]

    def admit(self, slot: int, tokens: list[int], num_prompt: int) -> None:
        """Give `slot` a row holding the first `num_prompt` tokens as prompt, the rest as output."""
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        device = self._output.device
        ids = upload(tokens, device, torch.int64)
        self._prompt[row].zero_().index_fill_(0, ids[:num_prompt], True)
        output = ids[num_prompt:]
        ones = torch.ones(output.shape, dtype=torch.int32, device=device)
        self._output[row].zero_().index_add_(0, output, ones)

    def release(self, slot: int) -> None:
        """Give the row of `slot` back; a slot without one is left alone."""
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Output counts int32 and prompt presence bool, `[N, vocab]`, of `rows` int64 `[N]`."""
        return self._output[rows], self._prompt[rows]

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one more output token, int64 `[N]`, in each of the distinct `rows` `[N]`."""
        self._output[rows, tokens] += 1

    def _grow(self) -> None:
        size = self._output.shape[0]
        more = max(size, 1)
        self._output = torch.cat(
            [self._output, self._output.new_zeros(more, *self._output.shape[1:])]
        )
        self._prompt = torch.cat(
            [self._prompt, self._prompt.new_zeros(more, *self._prompt.shape[1:])]
        )
        self._free.extend(range(size, size + more))
