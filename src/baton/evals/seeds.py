"""Random streams that cannot meet: every stream starts from its purpose, then from its path."""

from __future__ import annotations

from typing import Literal

import numpy as np

Purpose = Literal["training", "validation", "evaluation"]
_DOMAIN: dict[Purpose, int] = {"training": 0x7A11, "validation": 0x5A1D, "evaluation": 0xE7A1}


def stream(purpose: Purpose, *path: int) -> np.random.Generator:
    """The generator of one context. Streams of different purposes differ in their first word of
    entropy (`numpy.random.SeedSequence`), so no evaluation context is ever a training context.

    Args:
        purpose: what the context is for.
        path: non-negative integers that name it, such as seed, length and number.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([_DOMAIN[purpose], *path])))
