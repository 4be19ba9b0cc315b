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
        ids = (
            positions * 7 + row * 13 + 3
        ) % vocab_size  # any valid ids; varied so that experts spread
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


def probes(
    *, max_tokens: int, max_len: int, max_seqs: int, pool_tokens: int, quick: bool
) -> list[Probe]:
    """Steps to time: decodes and chunks, short and long context, within what the pool holds.

    `quick` keeps the largest chunk small (CPU), so that start-up stays in seconds.
    """
    longest = min(max_len, pool_tokens)
    chunks = (16, 64, 128) if quick else (512, 4096, 16384)
    contexts = (0, 512) if quick else (0, 32768)
    found = []
    for chunk in chunks:
        for context in contexts:
            if chunk <= max_tokens and context + chunk <= longest:
                found.append(Probe(1, chunk, context))
    for seqs in (1, 4) if quick else (1, 16, 64):
        for context in contexts:
            if seqs <= max_seqs and seqs * (context + 1) <= longest:
                found.append(Probe(seqs, 1, context))
    return found


def chunks(most: int) -> list[int]:
    """Sizes of prefill to compile kernels for: kernels change their shape with it, in powers of
    2."""
    return [*(2**i for i in range(4, most.bit_length()) if 2**i < most), most]
