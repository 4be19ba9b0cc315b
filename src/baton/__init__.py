"""Baton: serves mixture-of-experts language models on very long prompts, under latency objectives.

>>> from baton import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.core.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.engine.async_engine import AsyncEngine
    from baton.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "SamplingParams", "__version__"]

_LAZY = {"LLM": "baton.engine.llm", "AsyncEngine": "baton.engine.async_engine"}


def __getattr__(name: str) -> Any:
    """Import the engine (and torch) only when it is asked for."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
