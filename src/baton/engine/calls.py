"""What a caller of `LLM` or `AsyncEngine` passes, checked and in its plain form before it runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from baton.core.errors import RequestError
from baton.core.sampling import SamplingParams

Prompt = str | Sequence[int]

_IDS = "a list of token ids"


def batch(prompts: Any) -> list[str | list[int]]:
    """All prompts of a call: one text, one list of token ids, or several of either.

    Raises:
        RequestError: something else is among them; names it.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", f"text, {_IDS}, or a list of either")
    if items and not any(isinstance(item, str) or _iterable(item) for item in items):  # ids alone
        return [token_ids(items, "prompts")]
    return [
        item if isinstance(item, str) else token_ids(item, f"prompts[{i}]", f"text or {_IDS}")
        for i, item in enumerate(items)
    ]


def token_ids(value: Any, name: str, expected: str = _IDS) -> list[int]:
    """A copy of `value`, any sequence of integers (also NumPy's or PyTorch's, and arrays of no
    dimensions that hold one), as plain ints. A bool is no integer, as in JSON.

    Raises:
        RequestError: it is something else, or not all of it are integers; says so of `name`.
    """
    ids = _items(value, name, expected)
    try:
        return msgspec.convert(ids, list[int])
    except msgspec.ValidationError:  # not all are int itself
        return [_token_id(item, f"{name}[{i}]") for i, item in enumerate(ids)]


def per_prompt(sampling: Any, count: int) -> list[SamplingParams]:
    """Sampling params for each of `count` prompts, from None, one for all, or one for each.

    Raises:
        RequestError: they are something else, or too many or too few.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    items = _items(sampling, "sampling", "SamplingParams, or a list of them")
    if len(items) != count:
        raise RequestError(f"{len(items)} sampling params for {count} prompts", param="sampling")
    for i, item in enumerate(items):
        if not isinstance(item, SamplingParams):
            raise _wrong(f"sampling[{i}]", "SamplingParams", item)
    return items


def conversation(messages: Any) -> list[Any]:
    """Raises RequestError unless it is a list; what is in it is the chat template's to check."""
    return _items(messages, "messages", "a list of messages")


def to_score(prompts: Any) -> list[tuple[list[int], int]]:
    """The `(token_ids, start)` of a call to `LLM.examine`.

    Raises:
        RequestError: they are something else, or leave nothing to score.
    """
    found = []
    for i, pair in enumerate(_items(prompts, "prompts", "a list of (token_ids, start)")):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise _wrong(f"prompts[{i}]", "(token_ids, start)", pair)
        ids, start = token_ids(pair[0], "token_ids"), _integer(pair[1], "start", "a position")
        if start < 0 or len(ids) < start + 2:
            least = "two tokens" if start == 0 else f"two tokens from position {start} on"
            raise RequestError(f"score needs at least {least}", param="token_ids")
        found.append((ids, start))
    return found


def check_rest(cache_salt: Any, progress: Any) -> None:
    """Raises RequestError for a `cache_salt` that is no text, or a `progress` not to be called."""
    if not isinstance(cache_salt, str):
        raise _wrong("cache_salt", "text", cache_salt)
    if any("\ud800" <= char <= "\udfff" for char in cache_salt):
        raise RequestError("cache_salt has a lone surrogate: not valid Unicode", param="cache_salt")
    if progress is not None and not callable(progress):
        raise _wrong("progress", "a function of (finished, total)", progress)


def _items(value: Any, name: str, expected: str) -> list[Any]:
    value = _plain(value)
    if not _iterable(value):
        raise _wrong(name, expected, value)
    return list(value)


def _plain(value: Any) -> Any:
    """What is of NumPy, PyTorch or array as the list or number that it stands for."""
    return value.tolist() if hasattr(value, "tolist") else value


def _iterable(value: Any) -> bool:
    """Whether it holds several things in an order that means something."""
    if getattr(value, "ndim", None) == 0:  # NumPy's and PyTorch's classes have `__iter__` anyway
        return False
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set)


def _token_id(value: Any, name: str) -> int:
    return _integer(value, name, "a token id (an integer)")


def _integer(value: Any, name: str, expected: str) -> int:
    plain = _plain(value)
    if isinstance(plain, bool):
        raise _wrong(name, expected, value)
    try:
        return operator.index(plain)
    except TypeError:
        raise _wrong(name, expected, value) from None


def _wrong(name: str, expected: str, value: Any) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    message = f"{name} must be {expected}, got {shown} ({type(value).__name__})"
    return RequestError(message, param=name.partition("[")[0])
