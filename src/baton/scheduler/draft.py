"""The rows of one step while they are being chosen, and as long as the step is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.step import Admit, Row
from baton.scheduler.cost import Features, pairs
from baton.scheduler.state import Sequence

#: Shared by the many rows that bring neither ids nor pages. Never written to.
NONE: list[int] = []


@dataclass(slots=True)
class Draft:
    """`rows[i]` belongs to `sequences[i]`; the counts are what the cost model sees.

    partial: running sequences with tokens left to send by id, as far as is known.
    starved: a running sequence lacked pages, which must come back before anything starts.
    """

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    admit: list[Admit] = field(default_factory=list)
    decodes: int = 0
    tokens: int = 0
    pairs: float = 0.0
    context: int = 0
    longest: int = 0
    partial: list[Sequence] = field(default_factory=list)
    starved: bool = False

    @property
    def features(self) -> Features:
        """The draft as the cost model sees it."""
        return Features(self.tokens, self.pairs, self.context, len(self.rows))

    def decode(self, sequence: Sequence, pages: list[int]) -> None:
        """Add a row for the token that the slot sampled last."""
        start = sequence.computed
        self.rows.append(Row(sequence.slot, start, 1, NONE, pages, True))
        self.sequences.append(sequence)
        sequence.computed = start + 1
        sequence.placeholders += 1
        sequence.in_flight += 1
        self.decodes += 1
        self.tokens += 1
        self.context += start
        if start >= self.longest:
            self.longest = start + 1

    def chunk(self, sequence: Sequence, size: int, pages: list[int]) -> None:
        """Add a row for tokens `[computed, computed + size)`, which are sent by id."""
        start, end = sequence.computed, sequence.computed + size
        tokens = sequence.tokens
        last = end == sequence.prefill_end
        wants = sequence.prompt_logprobs is not None
        top = sequence.request.sampling.prompt_logprobs if wants else None
        row = Row(
            slot=sequence.slot,
            start=start,
            length=size,
            tokens=tokens[start:end],
            pages=pages,
            sample=last,
            score=sequence.request.score,
            prompt_logprobs=-1 if top is None else top,
            next_token=tokens[end] if end < len(tokens) else -1,
        )
        self.rows.append(row)
        self.sequences.append(sequence)
        self.tokens += size
        self.pairs += pairs(size, start)
        sequence.computed = end
        sequence.in_flight += 1
        sequence.placeholders += last

    def enter(self, sequence: Sequence) -> None:
        """Tell the runner about a sequence that took a slot."""
        sampling = sequence.request.sampling
        self.admit.append(
            Admit(
                slot=sequence.slot,
                sampling=sampling,
                seed=sequence.seed,
                num_prompt=sequence.num_prompt,
                num_output=len(sequence.tokens) - sequence.num_prompt,
                tokens=list(sequence.tokens) if sampling.penalised else NONE,
                stop_ids=sorted(sequence.stops) if sampling.min_tokens else NONE,
            )
        )
