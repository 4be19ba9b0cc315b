"""Synthetic steps that the cost model is fitted on at start-up, with context behind the chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.core.forward import ForwardBatch


@dataclass(frozen=True)
class Probe:
    """`seqs` sequences, each `chunk` new tokens after `context` cached ones."""

    seqs: int
    chunk: int
    context: int

    def batch(
        self, page_size: int, num_pages: int, vocab_size: int, device: torch.device
    ) -> tuple[torch.Tensor, ForwardBatch]:
        """Token ids [T] and a batch over existing pages; contents do not matter, only shapes."""
        total = self.context + self.chunk
        width = -(-total // page_size)
        pages = torch.arange(self.seqs * width, device=device).view(self.seqs, width) % num_pages
        positions = torch.arange(self.context, total, device=device).repeat(self.seqs)
        row = torch.arange(self.seqs, device=device).repeat_interleave(self.chunk)
        slots = pages[row, positions // page_size] * page_size + positions % page_size
        # Any valid ids, varied so that experts spread.
        ids = (positions * 7 + row * 13 + 3) % vocab_size
        return ids, ForwardBatch(
            query_lens=[self.chunk] * self.seqs,
            context_lens=[self.context] * self.seqs,
            positions=positions,
            slots=slots,
            pages=pages,
        )


def mixed(page_size: int, device: torch.device) -> tuple[torch.Tensor, ForwardBatch]:
    """A page of prefill beside two decodes."""
    (ids, a), (more, b) = (
        probe.batch(page_size, 1, 2, device)
        for probe in (Probe(1, page_size, 0), Probe(2, 1, page_size - 1))
    )
    return torch.cat((ids, more)), ForwardBatch(
        query_lens=a.query_lens + b.query_lens,
        context_lens=a.context_lens + b.context_lens,
        positions=torch.cat((a.positions, b.positions)),
        slots=torch.cat((a.slots, b.slots)),
        pages=torch.cat((a.pages, b.pages)),
    )


#: `(chunk, context)` of prefills and `(sequences, context)` of decodes. With much context behind
#: small and large chunks, what a chunk costs per pair and what it costs however short come apart.
QUICK = (
    [(chunk, context) for chunk in (16, 64, 128) for context in (0, 512)],
    [(seqs, context) for seqs in (1, 4) for context in (0, 512)],
)
FULL = (
    [(512, 0), (4096, 0), (16384, 0), (2048, 32768), (8192, 32768), (1024, 131072), (4096, 131072)],
    [(seqs, context) for seqs in (1, 16, 64) for context in (0, 32768)],
)


def probes(
    *, max_tokens: int, max_len: int, max_seqs: int, pool_tokens: int, quick: bool
) -> list[Probe]:
    """Steps to time: decodes and chunks, short and long context, within what the pool holds.

    `quick` keeps the largest chunk small (CPU), so that start-up stays in seconds.
    """
    longest = min(max_len, pool_tokens)
    prefills, decodes = QUICK if quick else FULL
    found = []
    for chunk, context in prefills:
        if chunk <= max_tokens and context + chunk <= longest:
            found.append(Probe(1, chunk, context))
    for seqs, context in decodes:
        if seqs <= max_seqs and context < max_len and seqs * (context + 1) <= pool_tokens:
            found.append(Probe(seqs, 1, context))
    return found


def chunks(most: int) -> list[int]:
    """Sizes of prefill to compile kernels for: kernels change their shape with it, in powers of
    2."""
    return [*(2**i for i in range(4, most.bit_length()) if 2**i < most), most]
