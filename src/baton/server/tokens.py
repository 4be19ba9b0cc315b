"""Token ids as text in answers, and log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.core.request import PositionLogprobs, TokenLogprob
from baton.server.protocol import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity; vLLM's word for "impossible"


class TokenText:
    """Token strings, remembered: log-probabilities ask for the same ones again and again."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int, as_id: bool = False) -> str:
        """Text of a token, or `token_id:N` when asked for or when there is no tokenizer."""
        if as_id or self._tokenizer is None:
            return f"token_id:{token_id}"
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._tokenizer.token(token_id)
        return text

    def bytes(self, token_id: int) -> list[int] | None:
        """Bytes of a token: clients join them where a character spans tokens."""
        if self._tokenizer is None:
            return None
        return list(self._tokenizer.token_bytes(token_id))


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    ids: Sequence[int],
    text: TokenText,
    offset: int,
    as_id: bool = False,
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion choice for tokens `ids`, and the text offset after them.

    A position of None (the first of a prompt) has no log-probability.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, position in zip(ids, positions, strict=True):
        token = text(token_id, as_id)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        if position is None:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(_finite(position.chosen))
        best = {text(t.token_id, as_id): _finite(t) for t in reversed(position.top)}
        top.append(best | {token: _finite(position.chosen)})
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": offsets,
    }, offset


def chat_logprobs(
    positions: Sequence[PositionLogprobs], text: TokenText, as_id: bool = False
) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": text(token.token_id, as_id),
            "logprob": _finite(token),
            "bytes": text.bytes(token.token_id),
        }

    return {
        "content": [
            entry(position.chosen) | {"top_logprobs": [entry(t) for t in position.top]}
            for position in positions
        ],
        "refusal": None,
    }


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], text: TokenText
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per position a map from token id to log-probability."""

    def row(position: PositionLogprobs) -> dict[str, Any]:
        return {
            str(t.token_id): {
                "logprob": _finite(t),
                "rank": t.rank,
                "decoded_token": text(t.token_id),
            }
            for t in (position.chosen, *position.top)
        }

    return [None if position is None else row(position) for position in positions]


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _FLOOR)
