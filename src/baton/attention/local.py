"""Attention to blocks: a token sees its own block, up to itself, and the block before.

Blocks are whole pages, so a backend needs to know nothing of this: each run of a step's rows that
lie in one block is a sequence of its own, whose page table begins at the block before and whose
lengths count from there. Rotation uses true positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from baton.attention.backend import Attention, AttentionBackend
from baton.attention.positions.rotary import RotaryPositions
from baton.core.forward import ForwardBatch


class LocalAttention(Attention):
    """See the module.

    Args:
        block: tokens, a multiple of the page size.
    """

    def __init__(
        self,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        positions: RotaryPositions,
        block: int,
    ) -> None:
        super().__init__(prefill, decode, positions)
        self.block = block

    def seen(self, batch: ForwardBatch, page_size: int) -> ForwardBatch:
        """See Attention."""
        start = (batch.positions // self.block - 1).clamp(min=0) * self.block
        pieces = list(self._pieces(batch))
        width = 2 * self.block // page_size
        if all(length == 1 for length in batch.query_lens):  # read nothing of the host's lengths
            column = start[:, None] // page_size + torch.arange(width, device=start.device)
            pages = batch.pages.gather(1, column.clamp(max=batch.pages.shape[1] - 1))
        else:
            pages = torch.cat([_table(batch.pages, *piece[:2], page_size, width)
                               for piece in pieces])  # fmt: skip
        return ForwardBatch(
            query_lens=[length for _, _, length, _ in pieces],
            context_lens=[context for _, _, _, context in pieces],
            positions=batch.positions - start,
            slots=batch.slots,
            pages=pages,
        )

    def _pieces(self, batch: ForwardBatch) -> Iterator[tuple[int, int, int, int]]:
        """Runs of rows in one block: sequence, first token seen, rows, tokens seen before them."""
        lens = zip(batch.query_lens, batch.context_lens, strict=True)
        for sequence, (length, context) in enumerate(lens):
            at, end = context, context + length
            while at < end:
                start = max(0, at // self.block - 1) * self.block
                stop = min(end, (at // self.block + 1) * self.block)
                yield sequence, start, stop - at, at - start
                at = stop


def _table(
    pages: torch.Tensor, sequence: int, start: int, page_size: int, width: int
) -> torch.Tensor:
    """`[1, width]`: the pages of a sequence from token `start` on, then zeros."""
    first = start // page_size
    found = pages[sequence : sequence + 1, first : first + width]
    return F.pad(found, (0, width - found.shape[1]))
