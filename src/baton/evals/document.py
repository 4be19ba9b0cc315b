"""What an evaluation found, as one JSON file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.core.errors import ConfigError
from baton.evals.exam import Exam

VERSION = 1
TOP = 20  #: tokens kept of the distribution at each answer position


class Answer(msgspec.Struct, kw_only=True):
    """One query and how it was answered.

    context: number of the context among those of its task and length.
    distance: tokens between the question and the farthest fact that it needs.
    depth: where that fact lies, 0 at the start of the context and 1 at its end.
    hit: every answer token was the likeliest one.
    loss: nats per answer token, None where the server does not tell.
    ids, logprobs: the likeliest tokens at each answer position and their log-probabilities, after
        the right answer up to there.
    accepted: at how many of these positions the MTP module had guessed the likeliest token, one
        token earlier; None where none is loaded.
    """

    task: str
    length: int
    context: int
    distance: int
    depth: float
    note: str
    hit: bool
    loss: float | None = None
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    accepted: int | None = None


class Perplexity(msgspec.Struct, kw_only=True):
    """Of one text: mean loss in nats per token over `tokens`, in windows of `length` tokens.
    accepted: share of the model's likeliest tokens that its MTP module had guessed one token
    earlier; None where none is loaded."""

    text: str
    length: int
    tokens: int
    loss: float
    accepted: float | None = None

    @property
    def value(self) -> float:
        """exp of the mean loss."""
        return float(np.exp(self.loss))


class Document(msgspec.Struct, kw_only=True):
    """See the module.

    subject: model, fingerprint and options, or the address.
    about: commit, machine, packages, time.
    suite: settings of `exam.Suite`.
    digest: SHA-256 (hex) over all queries: equal digests mean equal queries.
    no_perplexity: why none was measured, for people; empty where it was.
    seconds: wall time of the queries.
    computed: tokens that the engine computed for them, of `prompts` that they have; None for a
        server.
    """

    version: int = VERSION
    subject: dict[str, Any]
    about: dict[str, Any]
    suite: dict[str, Any]
    digest: str
    answers: list[Answer]
    perplexity: list[Perplexity] = []
    no_perplexity: str = ""
    seconds: float = 0.0
    prompts: int = 0
    computed: int | None = None

    @property
    def name(self) -> str:
        """The subject in a word."""
        return str(self.subject.get("name", "?"))

    def acceptance(self) -> list[tuple[str, float, int]]:
        """Where an MTP module is loaded: in each text and in the answers of each task, the share of
        its guesses that are the model's own, and the number of tokens."""
        found = [
            (text.text, text.accepted, text.tokens)
            for text in self.perplexity
            if text.accepted is not None
        ]
        for task in dict.fromkeys(one.task for one in self.answers):
            mine = [one for one in self.answers if one.task == task and one.accepted is not None]
            tokens = sum(len(one.ids) for one in mine)
            if tokens:
                found.append((task, sum(one.accepted or 0 for one in mine) / tokens, tokens))
        return found


class Digest:
    """SHA-256 over exams, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, exam: Exam) -> None:
        """One more."""
        head = f"{exam.task} {exam.length} {exam.number} {len(exam.tokens)}"
        self._hash.update(head.encode() + np.array(exam.tokens, "<i4").tobytes())
        for query in exam.queries:
            head = f"{query.at} {query.spans} {query.distance}"
            self._hash.update(head.encode() + np.array(query.tokens, "<i4").tobytes())

    def text(self) -> str:
        """In hex."""
        return self._hash.hexdigest()

    @classmethod
    def of(cls, exam: Exam) -> str:
        """Of one exam alone, in hex."""
        digest = cls()
        digest.add(exam)
        return digest.text()


def save(document: Document, path: Path) -> None:
    """Write it.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.encode(document))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def load(path: Path) -> Document:
    """Read it.

    Raises:
        ConfigError: it cannot be read, or is no result of `baton eval` of this version.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Document)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of baton eval: {error}") from None
    if found.version != VERSION:
        raise ConfigError(f"{path} has version {found.version}, expected {VERSION}")
    return found
