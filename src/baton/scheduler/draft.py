"""The rows of one step while they are being chosen, and as long as the step is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.step import Admit, Row
from baton.scheduler.budget import Cut
from baton.scheduler.cost import Features, pairs
from baton.scheduler.state import Sequence

#: Shared by the many rows that bring no pages. Never written to.
NONE: list[int] = []


@dataclass(slots=True)
class Draft:
    """`rows[i]` belongs to `sequences[i]`.

    tokens: computed when the step is.
    work, pairs, behind, passes: tokens, pairs, context and rows of chunks as the cost model sees
        them: those on their way through the layers by their share.
    partial: running sequences with tokens left to send by id, as far as is known.
    starved: a running sequence lacked pages, which must come back before anything starts.
    """

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    admit: list[Admit] = field(default_factory=list)
    decodes: int = 0
    tokens: int = 0
    work: float = 0.0
    passes: float = 0.0
    pairs: float = 0.0
    behind: float = 0.0
    context: int = 0
    longest: int = 0
    partial: list[Sequence] = field(default_factory=list)
    starved: bool = False

    @property
    def features(self) -> Features:
        """The draft as the cost model sees it."""
        tokens, sequences = self.decodes + self.work, self.decodes + self.passes
        return Features(tokens, self.pairs, self.context, sequences, self.behind)

    def decode(self, sequence: Sequence, pages: list[int]) -> None:
        """Add a row for the token that the slot sampled last."""
        start = sequence.computed
        self.rows.append(Row(sequence.slot, start, 1, b"", pages, True))
        self.sequences.append(sequence)
        sequence.computed = start + 1
        sequence.placeholders += 1
        sequence.in_flight += 1
        self.decodes += 1
        self.tokens += 1
        self.context += start
        if start >= self.longest:
            self.longest = start + 1

    def chunk(self, sequence: Sequence, cut: Cut, num_layers: int, pages: list[int]) -> None:
        """Add a row for `cut` of the tokens behind `computed`, which are sent by id."""
        size, first, upto = cut.size, sequence.passed, sequence.passed + cut.layers
        start, end = sequence.computed, sequence.computed + size
        tokens = sequence.tokens
        ends = upto == num_layers
        last = ends and end == sequence.prefill_end
        wants = sequence.prompt_logprobs is not None
        top = sequence.request.sampling.prompt_logprobs if wants else None
        row = Row(
            slot=sequence.slot,
            start=start,
            length=size,
            tokens=tokens[start:end].tobytes(),
            pages=pages,
            sample=last,
            score=sequence.score if sequence.score < size else -1,
            prompt_logprobs=-1 if top is None else top,
            next_token=tokens[end] if end < len(tokens) else -1,
            layers=None if cut.layers == num_layers else (first, upto),
            ends=ends,
        )
        self.rows.append(row)
        self.sequences.append(sequence)
        share = cut.layers / num_layers
        self.tokens += size if ends else 0
        self.work += size * share
        self.passes += share
        self.pairs += pairs(size, start) * share
        self.behind += start * share
        sequence.computed = end if ends else start
        sequence.chunk, sequence.passed = (0, 0) if ends else (size, upto)
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
