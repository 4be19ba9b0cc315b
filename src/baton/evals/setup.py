"""From flags to a suite, a form and texts."""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from baton import __version__
from baton.core.errors import ConfigError
from baton.core.units import parse_bytes
from baton.evals import vocab
from baton.evals.exam import Suite
from baton.evals.forms import Form
from baton.evals.marks import Marks
from baton.evals.run import Text
from baton.evals.tasks import ACROSS, TASKS, Borders
from baton.evals.text import sources
from baton.evals.words import Encoder, Words
from baton.models.source import resolve_source
from baton.models.tokenizer import Tokenizer, load_tokenizer

GROUPS = {
    "all": TASKS,
    "across": ACROSS,
    "ruler": tuple(task for task in TASKS if task not in ACROSS),
}
LIBRARY = "library"
_PACKAGES = ("torch", "triton", "transformers", "numpy")


def suite_of(flags: dict[str, Any]) -> Suite:
    """The suite that `cli.eval.EvalFlags` describe; its form is still to be found.

    Raises:
        ConfigError: naming the flag.
    """
    tasks: list[str] = []
    for name in _names(flags["tasks"]):
        tasks += [task for task in GROUPS.get(name, (name,)) if task not in tasks]
    borders = Borders(*(flags[name] for name in ("page", "block", "chunk", "segments")))
    own = {name: flags[name] for name in ("contexts", "queries", "alphabet")}
    return Suite(
        tasks=tuple(tasks),
        lengths=_lengths(flags["lengths"]),
        seed=flags["exam_seed"],
        borders=borders,
        **own,
    ).check()


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _lengths(text: str) -> tuple[int, ...]:
    """`"4K,512K"` in tokens, where K is 1024."""
    try:
        parts = [part.upper().replace("K", "KiB").replace("M", "MiB") for part in _names(text)]
        return tuple(sorted(parse_bytes(part) for part in parts))
    except ValueError:
        raise ConfigError(f"--lengths {text}: write for example 4K,32K or 8192") from None


def form_of(suite: Suite, form: str, tokenizer: Encoder | None) -> tuple[Form, Suite]:
    """How the model reads, and the suite that says so. "auto": as the tokenizer suggests.

    Raises:
        ConfigError: text for a model without a tokenizer.
    """
    if form == "auto":
        marked = tokenizer is not None and tokenizer.encode("<def>") == [vocab.DEF]
        form = "marks" if marked else "words"
    if form == "marks":
        return Marks(suite.alphabet, suite.seed), replace(suite, form="marks")
    if tokenizer is None:
        raise ConfigError("tasks in words need a tokenizer: give --tokenizer, or --form marks")
    return Words(tokenizer), replace(suite, form="words")


def tokenizer_at(folder: str | None) -> Tokenizer | None:
    """The tokenizer of a folder, embedded model or hub id; None without one."""
    return None if folder is None else load_tokenizer(resolve_source(folder))


def no_perplexity(tokens: int, tokenizer: Encoder | None) -> str:
    """Why no text is read, for people; empty where `texts_of` finds some."""
    if tokens < 1:
        return "not asked for (--text-tokens 0)"
    return "" if tokenizer is not None else "no tokenizer for the text: give --tokenizer"


def texts_of(
    suite: Suite, names: Sequence[str], tokens: int, tokenizer: Encoder | None
) -> list[Text]:
    """The first `tokens` of each text, to be read in windows as long as the longest context.

    Raises:
        ConfigError: a file cannot be read, or is empty.
    """
    if tokens < 1 or tokenizer is None:  # `no_perplexity` says so
        return []
    found = []
    for name in names:
        if name == LIBRARY:
            raw = sources(held_out=True).tobytes()
        else:
            try:
                raw = Path(name).read_bytes()
            except OSError as error:
                raise ConfigError(f"--text {name}: {error}") from None
        # no token is shorter than a byte on average, and few texts take more than 8 bytes a token
        text = raw[: 8 * tokens].decode("utf-8", errors="replace")
        if not text:
            raise ConfigError(f"--text {name}: the file is empty")
        ids = tokenizer.encode(text)[:tokens]
        title = f"{Path(name).name} {zlib.crc32(text.encode()):08x}"
        found.append(Text(title, ids, min(max(suite.lengths), len(ids))))
    return found


def about() -> dict[str, Any]:
    """When and on what this runs."""
    found: dict[str, Any] = {
        "baton": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
