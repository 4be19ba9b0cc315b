"""An evaluation from its settings to its document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from baton.core.errors import ConfigError
from baton.evals.document import Digest, Document, Perplexity
from baton.evals.exam import Exam, Suite
from baton.evals.forms import Form
from baton.evals.resume import Part, Parts
from baton.evals.subject import Engine, Subject

Show = Callable[[int, int, str], None]
"""`show(done, total, what)`; see `core.progress`."""
QUERIES = "queries"  #: `what` while they are asked


@dataclass
class Count:
    """Queries answered so far."""

    done: int
    total: int
    show: Show
    lock: Lock = field(default_factory=Lock)

    def __call__(self, more: int) -> None:
        """So many more, from any thread."""
        with self.lock:
            self.done += more
            self.show(min(self.done, self.total - 1), self.total, QUERIES)


@dataclass(frozen=True)
class Text:
    """A text for perplexity: token ids, read in windows of `length`."""

    name: str
    tokens: list[int]
    length: int


def run(
    subject: Subject,
    form: Form,
    suite: Suite,
    texts: Sequence[Text],
    facts: tuple[dict[str, Any], dict[str, Any]],
    show: Show,
    parts: Parts | None = None,
    no_perplexity: str = "",
) -> Document:
    """Ask everything.

    Args:
        facts: the document's `subject` and `about`.
        parts: what is answered already, and where more answers are kept.
        no_perplexity: why there are no texts.

    Raises:
        ConfigError: a length or a text is too short or too long.
    """
    longest = max(suite.lengths)
    if subject.longest is not None and longest > subject.longest:
        raise ConfigError(
            f"a length of {longest} is beyond the model's longest of {subject.longest}: choose "
            "shorter lengths, or give --max-model-len"
        )
    losses = [perplexity(subject, text, show) for text in texts]
    parts = parts or Parts(None, {})
    digest, prompts, most = Digest(), 0, len(suite) * suite.queries
    found: list[Part] = []
    for number, exam in enumerate(suite.exams(form)):
        digest.add(exam)
        part = parts.find(exam)
        if part is None:
            part = _take(subject, exam, Count(number * suite.queries, most, show))
            parts.add(part)
        found.append(part)
        prompts += sum(query.at + len(query.tokens) for query in exam.queries)
    show(most, most, QUERIES)
    computed = [part.computed for part in found if part.computed is not None]
    return Document(
        subject=facts[0],
        about=facts[1],
        suite=suite.settings(),
        digest=digest.text(),
        answers=[answer for part in found for answer in part.answers],
        perplexity=losses,
        no_perplexity=no_perplexity,
        seconds=round(sum(part.seconds for part in found), 3),
        prompts=prompts,
        computed=sum(computed) if len(computed) == len(found) else None,
    )


def _take(subject: Subject, exam: Exam, count: Count) -> Part:
    """Ask about one context."""
    begin, before = time.monotonic(), _computed(subject)
    answers = subject.take(exam, count)
    after, seconds = _computed(subject), time.monotonic() - begin
    computed = None if after is None or before is None else after - before
    return Part(
        task=exam.task,
        length=exam.length,
        number=exam.number,
        digest=Digest.of(exam),
        answers=answers,
        seconds=seconds,
        computed=computed,
    )


def perplexity(subject: Subject, text: Text, show: Show) -> Perplexity:
    """Of a text in windows that know nothing of one another; a rest of less than half a window is
    left out.

    Raises:
        ConfigError: the text is shorter than that.
    """
    size = text.length  # of a prompt, which leaves room for an answer
    if subject.longest is not None:
        size = min(size, subject.longest - 1)
    starts = range(0, len(text.tokens), size)
    windows = [text.tokens[s : s + size] for s in starts]
    windows = [window for window in windows if len(window) > max(1, size // 2)]
    if not windows:
        raise ConfigError(
            f"the text {text.name!r} has {len(text.tokens)} tokens, too few for a window of {size}"
        )
    loss = tokens = 0.0
    accepted: float | None = 0.0
    for i, window in enumerate(windows):
        show(i, len(windows), f"perplexity of {text.name}")
        loss += subject.loss(window) * (len(window) - 1)
        tokens += len(window) - 1
        share = subject.accepted(window)
        accepted = None if accepted is None or share is None else accepted + share / len(windows)
    show(len(windows), len(windows), f"perplexity of {text.name}")
    return Perplexity(
        text=text.name, length=size, tokens=int(tokens), loss=loss / tokens, accepted=accepted
    )


def _computed(subject: Subject) -> int | None:
    return subject.llm.stats().computed_tokens if isinstance(subject, Engine) else None
