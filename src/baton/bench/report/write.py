"""A report's files: the page, the document as JSON, and its figures as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.bench.record import Run
from baton.bench.report.document import Document, DocumentError, load_text, read_document, to_json
from baton.bench.report.page import page
from baton.bench.runfile import make_folder
from baton.bench.slo.level import SUCCESS
from baton.core.errors import ConfigError

PAGE, SUMMARY, RUNS, LOADS = "report.html", "summary.json", "runs.csv", "loads.csv"


def keep_others(folder: Path, runs: Collection[str] = (), searches: Collection[str] = ()) -> None:
    """See that a summary in the folder is only replaced by one of the same results and more.

    Args:
        runs, searches: names of runs, or shapes of searches, that the new one will have.

    Raises:
        ConfigError: it has others.
    """
    try:
        found = read_document(folder / SUMMARY)
    except DocumentError:  # none, or cut short: its runs are in files of their own
        return
    if found.searches:
        lost = {search.shape for search in found.searches} - set(searches)
    else:
        lost = {run.name for run in found.runs} - set(runs)
    if lost:
        kind = "searches" if found.searches else "runs"
        raise ConfigError(
            f"{folder} holds the results of other {kind} ({', '.join(sorted(lost))}), whose "
            f"{SUMMARY} would be replaced: give another --out"
        )


def write(folder: Path, made: Document, runs: Sequence[Run]) -> list[Path]:
    """Write all of them; returns their paths. `loads.csv` only where a load was searched."""
    make_folder(folder)
    contents = {
        PAGE: page(made, runs).encode(),
        SUMMARY: to_json(made),
        RUNS: runs_csv(made).encode(),
    }
    if made.searches:
        contents[LOADS] = loads_csv(made).encode()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def runs_csv(made: Document) -> str:
    """A row for each run, a column for each figure; seconds, tokens and shares."""
    rows = [
        {
            "name": run.name,
            "started": run.started,
            "load": load_text(run.load),
            "valid": not run.invalid,
            **dict(_scalars(run.metrics)),
        }
        for run in made.runs
    ]
    return _csv(rows)


def loads_csv(made: Document) -> str:
    """A row for each run of each search."""
    rows = []
    for search in made.searches:
        for level in search.found.levels:
            for trial in level.trials:
                rows.append(
                    {
                        "config": search.config,
                        "shape": search.shape,
                        "unit": search.unit,
                        "load": level.load,
                        "run": trial.name,
                        "valid": not trial.invalid,
                        "behind": trial.saturated is not None,
                        "sent": trial.sent,
                        "answered": trial.met[SUCCESS],
                        **{f"met.{n}": c for n, c in trial.met.items() if n != SUCCESS},
                        **{f"throughput.{n}": rate for n, rate in trial.throughput.items()},
                        **{
                            f"latency.{kind}.{p}": value
                            for kind, spread in trial.latency.items()
                            for p, value in spread.items()
                        },
                    }
                )
    return _csv(rows)


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Figures by dotted name; lists and reasons of failures are left to the JSON."""
    for name, value in values.items():
        if name in ("failures", "too_few"):
            continue
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    heads = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.DictWriter(out, heads, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()
