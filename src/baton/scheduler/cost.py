"""What a step costs, in seconds and in transient bytes, as a function of what is in it.

seconds = a + b * tokens + c * pairs + d * context + e * sequences + f * behind, all coefficients
>= 0. Attention makes `c` matter: at a context of 400K a chunk costs many times what it costs at 0,
so chunks are chosen by time (compare Sarathi-Serve, arXiv 2403.02310, which budgets tokens). `f` is
what a chunk costs however short it is: all keys and values behind it are gathered, and for latent
attention projected up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Features(NamedTuple):
    """What a step holds.

    tokens: all tokens computed, decodes included.
    pairs: query-key pairs of prefill chunks, sum of `chunk * (context + chunk / 2)`.
    context: tokens of KV that decodes read.
    sequences: rows in the plan.
    behind: tokens of KV that prefill chunks read, each once however long the chunk is.

    A chunk that passes only some of the layers counts by their share.
    """

    tokens: float = 0.0
    pairs: float = 0.0
    context: float = 0.0
    sequences: float = 0.0
    behind: float = 0.0

    def vector(self) -> tuple[float, ...]:
        """Regressors in the order of the coefficients."""
        return (1.0, *self)


def pairs(chunk: int, context: int) -> float:
    """Query-key pairs of `chunk` causal rows behind `context` tokens."""
    return chunk * (context + chunk / 2)


SIZE = 6
#: Before anything is measured: 1 ms per step, 10K tokens/s, 1 ns per pair, 10 ns per context token,
#: 100 ns per token behind a chunk.
DEFAULT = (1e-3, 1e-4, 1e-9, 1e-8, 2e-5, 1e-7)
#: Weight of one default sample against one measured sample: the first measurements win.
PRIOR_WEIGHT = 1e-3
#: Start-up samples count together as this many steps, for ever: they alone saw every shape.
START_WEIGHT = 32.0
#: Online samples lose this share per step; about the last 250 steps count.
MEMORY = 0.996
#: Online coefficients are solved anew every so many samples.
REFIT = 8


class NormalEquations:
    """Least squares of relative error, `sum w * (x.k / y - 1)^2`, kept as X'X and X'y."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * SIZE for _ in range(SIZE)]
        self.vector = [0.0] * SIZE

    def add(self, features: Features, seconds: float, weight: float = 1.0) -> None:
        """One sample. Dividing by `seconds` keeps rare slow steps from outvoting usual ones."""
        row = [value / seconds for value in features.vector()]
        for i, left in enumerate(row):
            if left:
                self.vector[i] += weight * left
                line = self.matrix[i]
                for j, right in enumerate(row):
                    line[j] += weight * left * right

    def scale(self, factor: float) -> None:
        """Multiply the weight of everything seen so far."""
        self.vector = [value * factor for value in self.vector]
        self.matrix = [[value * factor for value in line] for line in self.matrix]

    def plus(self, other: NormalEquations) -> NormalEquations:
        """The equations of both sets of samples."""
        total = NormalEquations()
        total.vector = [a + b for a, b in zip(self.vector, other.vector, strict=True)]
        total.matrix = [
            [a + b for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(self.matrix, other.matrix, strict=True)
        ]
        return total

    def solve(self, start: tuple[float, ...], sweeps: int) -> tuple[float, ...]:
        """Non-negative solution by coordinate descent from `start`. Each coordinate step is exact,
        so features of very different scales need no normalising."""
        k = list(start)
        for _ in range(sweeps):
            for i, line in enumerate(self.matrix):
                if line[i] > 0.0:
                    rest = sum(a * b for a, b in zip(line, k, strict=True)) - line[i] * k[i]
                    k[i] = max(0.0, (self.vector[i] - rest) / line[i])
        return tuple(k)


@dataclass
class BytesModel:
    """Transient bytes of a step.

    `scale * (base + per_token * tokens + per_context_token * min(longest, most_context))`, where
    `longest` is the longest context plus chunk among the rows: workspaces are re-used from sequence
    to sequence, and hold no more than `most_context` tokens at once.
    All zeros: no bound. `scale` is what one measured step says about the account (`engine.memory`);
    steps that were kept within a bound say nothing about larger ones, so nothing is learnt from
    them.
    """

    per_token: float = 0.0
    per_context_token: float = 0.0
    base: float = 0.0
    scale: float = 1.0
    most_context: float = math.inf

    def predict(self, tokens: int, longest: int) -> float:
        """Bytes of a step of `tokens` tokens."""
        held = self.per_context_token * min(longest, self.most_context)
        return self.scale * (self.base + self.per_token * tokens + held)

    def chunk_within(self, limit: float, tokens: int, longest: int, context: int) -> float:
        """Largest chunk behind `context` that keeps a step which already has `tokens` and
        `longest` within `limit` bytes; 0 if none, infinite if there is no bound."""
        left = (limit - self.predict(tokens, max(longest, context))) / self.scale
        if left < 0.0:
            return 0.0
        # The workspace costs nothing more while the chunk ends below `longest`, then grows with
        # the chunk until it is full.
        full = max(0.0, self.most_context - context)
        free = min(max(0, longest - context), full)
        size = 0.0
        for width, slope in (
            (free, self.per_token),
            (full - free, self.per_token + self.per_context_token),
        ):
            if slope and left < slope * width:
                return size + left / slope
            size, left = size + width, left - slope * width if slope else left
        return size + left / self.per_token if self.per_token else math.inf


@dataclass
class CostModel:
    """Predicts step seconds; seeded by `fit`, refined by `observe`. `bytes` is its byte side."""

    bytes: BytesModel = field(default_factory=BytesModel)
    coefficients: tuple[float, ...] = DEFAULT
    _base: NormalEquations = field(init=False, repr=False)
    _online: NormalEquations = field(init=False, repr=False)
    _fresh: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._base = _prior()
        self._online = NormalEquations()

    def predict(self, features: Features) -> float:
        """Seconds of a step."""
        a, b, c, d, e, f = self.coefficients
        tokens, pair, context, sequences, behind = features
        return a + b * tokens + c * pair + d * context + e * sequences + f * behind

    def added(self, chunk: int, context: int) -> float:
        """Seconds that a prefill row of `chunk` tokens adds to a step."""
        _, b, c, _, e, f = self.coefficients
        return e + b * chunk + c * pairs(chunk, context) + f * context

    def chunk_within(self, seconds: float, context: int) -> float:
        """Largest (real-valued) chunk behind `context` that adds at most `seconds`; 0 if none,
        infinite if there is no bound: root of c/2 n^2 + (b + c * context) n + e + f * context =
        seconds."""
        _, b, c, _, e, f = self.coefficients
        left = seconds - e - f * context
        if left <= 0.0:
            return 0.0
        linear = b + c * context
        root = linear + math.sqrt(linear * linear + 2.0 * c * left)
        return 2.0 * left / root if root > 0.0 else math.inf

    def fit(self, samples: Iterable[tuple[Features, float]]) -> None:
        """Seed from start-up measurements `(features, seconds)`. They should hold chunks with long
        context behind them: a profile of new tokens only is blind to `pairs`."""
        kept = [(features, seconds) for features, seconds in samples if seconds > 0.0]
        if not kept:
            return
        measured = NormalEquations()
        for features, seconds in kept:
            measured.add(features, seconds, START_WEIGHT / len(kept))
        self._base = _prior().plus(measured)
        self._online = NormalEquations()
        self.coefficients = self._base.solve(self.coefficients, sweeps=2000)

    def observe(self, features: Features, seconds: float) -> None:
        """Refine from one step that ran. Features that stopped occurring keep their start-up
        estimate, since only the online part is forgotten."""
        if seconds <= 0.0:
            return
        self._online.scale(MEMORY)
        self._online.add(features, seconds)
        self._fresh += 1
        if self._fresh % REFIT == 0:
            total = self._base.plus(self._online)
            self.coefficients = total.solve(self.coefficients, sweeps=8)


def _prior() -> NormalEquations:
    """Weak evidence for DEFAULT in every direction, so that the solution is always unique."""
    prior = NormalEquations()
    shapes = (
        Features(),
        Features(tokens=1, context=1000, sequences=1),
        Features(tokens=64, context=200_000, sequences=64),
        Features(tokens=64, pairs=pairs(64, 0), sequences=1),
        Features(tokens=2048, pairs=pairs(2048, 0), sequences=1),
        Features(tokens=2048, pairs=pairs(2048, 100_000), sequences=1, behind=100_000),
    )
    for shape in shapes:
        seconds = sum(k * x for k, x in zip(DEFAULT, shape.vector(), strict=True))
        prior.add(shape, seconds, PRIOR_WEIGHT)
    return prior
