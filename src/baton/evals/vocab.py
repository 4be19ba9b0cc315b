"""The vocabulary of the reference models: bytes, marks and symbols.

Text is bytes (ids 0 to 255). Facts and questions are written with marks, which say what follows,
and with symbols, which mean nothing: keys and values are made of them, so that nothing but the
context can tell an answer.
"""

from __future__ import annotations

KEY = 3  #: symbols of a key, and of a value
MOST = 8  #: most times that a key is defined where occurrences are counted

_SPECIAL = ("<bos>", "<eos>", "<pad>")
_MARKS = ("<def>", "<ask>", "<last>", "<all>", "<trace>", "<deep>", "<same>", "<top>")
_NTH = tuple(f"<nth{i + 1}>" for i in range(MOST))
SYMBOLS = 128

TOKENS: tuple[str, ...] = (
    *_SPECIAL,
    *_MARKS,
    "<yes>",
    "<no>",
    *_NTH,
    *(f"<s{i:03d}>" for i in range(SYMBOLS)),
)
"""Names of the ids from 256 on, in order."""

_ID = {name: 256 + i for i, name in enumerate(TOKENS)}
BOS, EOS, PAD = (_ID[name] for name in _SPECIAL)
DEF, ASK, LAST, ALL, TRACE, DEEP, SAME, TOP = (_ID[name] for name in _MARKS)
YES, NO = _ID["<yes>"], _ID["<no>"]
NTH = _ID["<nth1>"]  #: and the `MOST - 1` ids behind it
SYMBOL = _ID["<s000>"]  #: the first symbol
VOCAB = 448  #: rows of the embedding; the last ones stand for nothing

HIDDEN = frozenset(_SPECIAL)
