"""The reference models: sizes, stages and rates, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.evals.context import Mix
from training.model import Shape

#: Induction first: spans that repeat, and plain facts, over few symbols (a small alphabet makes
#: the first matches frequent).
_FIRST = Mix({"copy": 1.0, "ask": 2.0}, (8, 16, 32, 64), (0.5, 1.0))
_ALL = {
    "ask": 3.0, "last": 1.0, "nth": 1.0, "all": 1.0, "trace": 1.0, "deep": 1.0, "same": 1.0,
    "copy": 1.0, "top": 0.04,
}  # fmt: skip
_SHORT = Mix(_ALL, (16, 32, 64, 128), (0.4, 1.0))
_LONG = Mix(_ALL, (32, 64, 128), (0.1, 1.0))


@dataclass(frozen=True)
class Stage:
    """A part of training.

    lengths, weights: of contexts, one length per batch.
    until: share of the budget at which the stage ends at the latest.
    gate: it ends earlier once plain questions at its longest length reach this accuracy.
    text, mtp: weights of the text's and the MTP module's loss beside the answers' loss of 1.
    """

    mix: Mix
    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    until: float
    gate: float = 2.0
    text: float = 0.1
    mtp: float = 0.3


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run but the machine's speed.

    minutes: the budget of training time, over all commands that share it.
    tokens: of a step. rates: of Muon and Adam. decay: share of the budget over which the rates
    fall to zero.
    """

    name: str
    shape: Shape
    stages: tuple[Stage, ...]
    minutes: float
    tokens: int = 65536
    rates: tuple[float, float] = (0.01, 3e-3)
    warm_up: int = 100
    decay: float = 0.3
    balance: float = 1e-3
    seed: int = 1
    context: int = 32768
    check: tuple[int, ...] = (256, 1024, 4096, 16384, 32768)
    check_tokens: int = 131072


_ROPE = Recipe(
    name="recall-rope",
    shape=Shape(),
    stages=(
        Stage(_FIRST, (128, 256), (1.0, 1.0), 0.15, gate=0.9, mtp=0.0),
        Stage(_SHORT, (256, 512, 1024, 2048), (1.0, 1.0, 1.0, 1.0), 0.40, gate=0.97),
        Stage(_LONG, (512, 2048, 4096, 8192), (1.0, 1.0, 1.0, 1.0), 0.65),
        Stage(_LONG, (1024, 4096, 8192, 16384, 32768), (1.0, 1.0, 1.0, 1.5, 1.5), 1.0),
    ),
    minutes=15.0,
)

_512K = replace(
    _ROPE,
    name="recall-512k",
    shape=replace(_ROPE.shape, window=256, global_layers=(2, 5), theta=1e4),
    stages=(
        Stage(_FIRST, (128, 256), (1.0, 1.0), 0.15, gate=0.9, mtp=0.0),
        Stage(_SHORT, (256, 512, 1024, 2048), (1.0, 1.0, 1.0, 1.0), 0.40, gate=0.97),
        Stage(_LONG, (512, 2048, 8192, 16384), (1.0, 1.0, 1.0, 1.0), 0.65),
        Stage(_LONG, (1024, 8192, 32768, 65536, 131072), (1.0, 1.0, 1.0, 1.0, 1.0), 1.0),
    ),
    minutes=15.0,
    tokens=131072,
    context=524288,
    check=(256, 4096, 32768, 131072, 262144, 524288),
    check_tokens=262144,
)

#: Induction on a CPU in ten minutes: whether a change to model, data or optimiser still learns.
_TINY = replace(
    _ROPE,
    name="tiny",
    shape=Shape(hidden=64, layers=2, heads=4, latent=32, dense=64, experts=2, expert=32, top_k=1),
    stages=(
        Stage(Mix({"copy": 1.0, "ask": 2.0}, (8, 16), (0.6, 1.0)), (64,), (1.0,), 0.8, mtp=0.0),
        Stage(Mix({"copy": 1.0, "ask": 2.0}, (8, 16), (0.6, 1.0)), (64, 128), (1.0, 1.0), 1.0),
    ),
    minutes=10.0,
    tokens=1024,
    warm_up=30,
    context=512,
    check=(64, 128, 256),
    check_tokens=4096,
)

RECIPES = {recipe.name: recipe for recipe in (_ROPE, _512K, _TINY)}
