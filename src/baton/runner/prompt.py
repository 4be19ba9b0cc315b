"""Log-probabilities of tokens that are already known: prompt log-probabilities and scoring."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.core.request import PositionLogprobs, TokenLogprob
from baton.core.step import Row, Scores

#: Positions whose logits exist at once: 256 x 160K vocabulary in float32 is 160 MiB.
BLOCK = 256


def prompt_rows(
    rows: list[Row],
    hidden: torch.Tensor,
    ahead: torch.Tensor | None,
    logits: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[dict[int, list[PositionLogprobs]], dict[int, Scores]]:
    """For rows that ask: log-probabilities of each next token, and whole rows for scoring.

    Args:
        hidden: final hidden states [T, H], rows one after the other.
        ahead: the MTP module's, likewise, if it is loaded.
        logits: `[S, H] -> float32 [S, vocab]`.

    Returns:
        ({row: one entry per position whose next token is known}, {row: of its positions from
        `score` on}).
    """
    prompt: dict[int, list[PositionLogprobs]] = {}
    scores: dict[int, Scores] = {}
    end = 0
    for i, row in enumerate(rows):
        end += row.length
        if row.score < 0 and row.prompt_logprobs < 0:
            continue
        first = row.score if row.prompt_logprobs < 0 else 0
        targets = row.ids[1:].tolist()
        if row.next_token >= 0:
            targets.append(row.next_token)
        blocks: list[torch.Tensor] = []
        drafts: list[torch.Tensor] = []
        found: list[PositionLogprobs] = []
        for start in range(first, row.length, BLOCK):
            stop = min(start + BLOCK, row.length)
            place = slice(end - row.length + start, end - row.length + stop)
            wanted = slice(max(0, row.score - start), None)
            logprobs = logits(hidden[place]).log_softmax(-1)
            if row.score >= 0:
                blocks.append(logprobs[wanted].cpu())
            if row.score >= 0 and ahead is not None:
                drafts.append(logits(ahead[place][wanted]).argmax(-1).cpu())
            if row.prompt_logprobs >= 0:
                found += _positions(logprobs, targets[start:stop], row.prompt_logprobs)
        if row.score >= 0:
            scores[i] = Scores(torch.cat(blocks), torch.cat(drafts) if drafts else None)
        if row.prompt_logprobs >= 0:
            prompt[i] = found
    return prompt, scores


def _positions(logprobs: torch.Tensor, targets: list[int], top: int) -> list[PositionLogprobs]:
    """Entries for the first `len(targets)` rows of `logprobs` [n, vocab]."""
    if not targets:
        return []
    logprobs = logprobs[: len(targets)]
    index = torch.tensor(targets, device=logprobs.device).unsqueeze(1)
    chosen = logprobs.gather(1, index)
    ranks = (logprobs > chosen).sum(1) + 1
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=1)
    columns = zip(
        targets, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
    )
    return [
        PositionLogprobs(
            TokenLogprob(token, value, rank),
            [
                TokenLogprob(t, v, r + 1)
                for r, (t, v) in enumerate(zip(top_ids, top_values, strict=True))
            ],
        )
        for token, value, rank, top_ids, top_values in columns
    ]
