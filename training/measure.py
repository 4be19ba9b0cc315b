"""What a model in training can do: exact answers by family, length and distance, text loss, and
how often its MTP module agrees with it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from baton.evals import seeds
from baton.evals.context import KINDS, TEXT_KINDS, Mix, sample
from baton.evals.facts import FAMILIES
from baton.evals.text import Bytes
from training.data import Batch, batch_of
from training.model import Model
from training.recipes import Recipe

_FIRST_FAMILY = KINDS.index(FAMILIES[0])
_TOKENS = 32768  # of a forward pass


@dataclass
class Tally:
    """Hits and tries per name."""

    hits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tries: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, hits: float, tries: float) -> None:
        """Count more of them."""
        self.hits[name] += hits
        self.tries[name] += tries

    def rates(self) -> dict[str, float]:
        """Hits over tries, for names that were tried."""
        return {n: round(self.hits[n] / self.tries[n], 4) for n in self.tries if self.tries[n]}


def answers(kind: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last (excluded) positions of the answers in one row of kinds."""
    asked = np.concatenate(([0], (kind >= _FIRST_FAMILY).astype(np.int8), [0]))
    edge = np.diff(asked)
    return np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)


@torch.no_grad()
def predict(
    model: Model, tokens: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `[B, L]` tokens: for each position the model's guess at it, its MTP module's guess at it,
    and the model's loss there; `[B, L]`, nothing known about the first (two) positions."""
    hidden, ahead, _ = model(tokens, dtype)
    logits = model.head(hidden).float()
    loss = torch.zeros(tokens.shape, device=tokens.device)
    every = F.cross_entropy(logits, tokens.roll(-1, 1).flatten(), reduction="none")
    loss[:, 1:] = every.view_as(tokens)[:, :-1]
    guess = logits.argmax(-1).view_as(tokens).roll(1, 1)
    draft = model.head(ahead).argmax(-1).view_as(tokens).roll(2, 1)
    return guess, draft, loss


def measure(model: Model, batches: list[Batch], dtype: torch.dtype, device: torch.device) -> dict[
    str, dict[str, float]
]:  # fmt: skip
    """`exact`: share of answers right in every token, by family and by distance of plain
    questions; `bits`: per token of each text; `accepted`: share of tokens on which MTP module and
    model agree, by what the token is."""
    exact, bits, accepted = Tally(), Tally(), Tally()
    for batch in batches:
        tokens = batch["tokens"].to(device).long()
        found = [x.cpu().numpy() for x in predict(model, tokens, dtype)]
        for row, kind in enumerate(batch["kind"].numpy()):
            guess, draft, loss = (x[row] for x in found)
            right = guess == batch["tokens"][row].numpy()
            _answers(exact, kind, batch["distance"][row].numpy(), right)
            known = np.arange(len(kind)) > 1
            for code in np.unique(kind[kind > 0]):
                here, name = (kind == code) & known, KINDS[code]
                accepted.add(name, float((guess == draft)[here].sum()), float(here.sum()))
                if name in TEXT_KINDS:
                    bits.add(name, float(loss[here].sum() / np.log(2)), float(here.sum()))
    return {"exact": exact.rates(), "bits": bits.rates(), "accepted": accepted.rates()}


def _answers(
    exact: Tally, kind: NDArray[np.uint8], distance: NDArray[np.int32], right: NDArray[np.bool_]
) -> None:
    """Count the answers of one row."""
    wrong = np.concatenate(([0], np.cumsum(~right)))
    first, end = answers(kind)
    hit = wrong[end] == wrong[first]
    asked, far = kind[first], distance[first]
    news = (far > 0) | (asked == KINDS.index("top"))
    for code in np.unique(asked[news]):
        mine = news & (asked == code)
        exact.add(KINDS[code], float(hit[mine].sum()), float(mine.sum()))
    plain = (asked == _FIRST_FAMILY) & (far > 0)
    bucket = np.int64(2) ** np.ceil(np.log2(np.maximum(far, 1))).astype(np.int64)
    for size in np.unique(bucket[plain]):
        mine = plain & (bucket == size)
        exact.add(f"ask<={size}", float(hit[mine].sum()), float(mine.sum()))


def checks(
    recipe: Recipe, mix: Mix, length: int, texts: dict[str, Bytes], tokens: int
) -> list[Batch]:
    """Validation contexts of one length, about `tokens` in all but at least one of each family;
    no training context is among them. Plain questions are in all."""
    families = [name for name in mix.families if name not in ("ask", "top")]
    rows = max(len(families), tokens // length)
    made = []
    for i in range(rows):
        rng = seeds.stream("validation", recipe.seed, length, i)
        made.append(sample(rng, length, mix, texts, ("ask", families[i % len(families)])))
    size = max(1, _TOKENS // length)
    return [batch_of(made[i : i + size]) for i in range(0, rows, size)]
