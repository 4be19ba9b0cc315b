"""Writes benchmarks/RESULTS.md from the targets and from what `baton bench engine --out` measured.

usage: results.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypedDict

import msgspec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NOT_RUN = "not run yet"
ONE_PAIR = "one pair of runs"
HEAD = """# Results

Written by `tools/results.py`; how the figures came about is in [README.md](README.md).
vLLM is 0.25.0 on one NVIDIA H200; limits and goals are for one H200. Lower is better.
A decode step is the difference of two runs over 64 steps. Where long prompts leave time for one
pair of them, their noise is larger than a step, and full batches say what a step takes.
"""
START = ("start to first token (s)", "110 to 220", "20")


Documents = list[dict[str, Any]]


class Model(TypedDict):
    """See Result."""

    name: str


class Config(TypedDict):
    """See Result."""

    dtype: str
    kv_dtype: str


class Device(TypedDict):
    """See Result."""

    name: str
    ranks: int


class Versions(TypedDict):
    """See Result."""

    torch: str


class Print(TypedDict):
    """See Result."""

    digest: str


class Method(TypedDict):
    """See Result."""

    repeats: int


class Start(TypedDict):
    """See Result."""

    first_token_s: float
    kernel_cache: str | None


class First(TypedDict):
    """Time to the first token of prompts of so many tokens."""

    prompt: int
    ms: float | None


class Decode(TypedDict):
    """Time of a decode step."""

    batch: int
    context: int
    ms: float | None
    full_batch_ms: float | None
    repeats: int


class Left(TypedDict):
    """A point that was not measured."""

    point: str


class Result(TypedDict):
    """What the page takes from a result of `baton bench engine`."""

    commit: str | None
    config: Config
    decode: list[Decode]
    device: Device
    failed: list[Left]
    fingerprint: Print
    method: Method
    model: Model
    skipped: list[Left]
    start: Start
    ttft: list[First]
    versions: Versions
    when: str


def load(folder: Path) -> dict[tuple[str, str], Documents]:
    """`(model, variant) -> documents` of every result, the newest first; a file's name says both,
    and `MODEL.VARIANT.NAME.json` is one more run.

    Raises:
        ValueError: a file that is no result, or of another model or dtype than its name says.
    """
    found: dict[tuple[str, str], Documents] = {}
    for path in sorted(folder.glob("*.json")):
        model, _, rest = path.stem.partition(".")
        variant = rest.partition(".")[0]
        found.setdefault((model, variant), []).append(_read(path, model, variant))
    for documents in found.values():
        documents.sort(key=lambda document: str(document["when"]), reverse=True)
    return found


def _read(path: Path, model: str, variant: str) -> dict[str, Any]:
    """One result; see `load`."""
    if not variant:
        raise ValueError(f"{path.name}: the name is to be MODEL.VARIANT.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: no JSON: {error}") from None
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != "baton bench engine" or document.get("schema") != 1:
        raise ValueError(f"{path.name}: not a result of `baton bench engine`")
    try:
        msgspec.convert(document, Result)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if document["model"]["name"] != model:
        raise ValueError(f"{path.name}: measured on {document['model']['name']}")
    dtypes = {document["config"]["dtype"], document["config"]["kv_dtype"]}
    if (variant == "bf16") != (dtypes == {"bfloat16"}):
        raise ValueError(f"{path.name}: measured with {', '.join(sorted(dtypes))}")
    return document


def render(targets: list[dict[str, Any]], results: dict[tuple[str, str], Documents]) -> str:
    """The whole page."""
    parts = [HEAD]
    for table in targets:
        documents = results.get((table["model"], table["variant"]), [])
        parts.append(f"## {table['title']}\n")
        parts += _sources(table, documents)
        parts.append("\n".join(_rows(table, documents)) + "\n")
    return "\n".join(parts)


def _sources(table: dict[str, Any], documents: Documents) -> list[str]:
    """Which run the figures are of; of a run that only some are of, which ones."""
    points: dict[int, list[str]] = {}
    for point in table["points"]:
        document, row, _ = _find(documents, point)
        if row is not None:
            points.setdefault(documents.index(document), []).append(point.partition(" ")[2])
    if len(points) == 1:
        return [_source(documents[next(iter(points))])]
    return [f"{', '.join(points[i])}: {_source(documents[i])}" for i in sorted(points)]


def _rows(table: dict[str, Any], documents: Documents) -> list[str]:
    """Markdown rows: a first-token table ends with the start, a decode table has full batches."""
    decode = table["points"][0].startswith("decode")
    heads = ["", "ours", *(["ours, full batch"] if decode else []), "vLLM", "limit", "goal"]
    lines = [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for place, point in enumerate(table["points"]):
        _, row, missing = _find(documents, point)
        cells = [point.partition(" ")[2], missing if row is None else _number(row["ms"])]
        if decode:
            if row is not None and row["repeats"] == 1:
                cells[1] = ONE_PAIR
            cells.append("" if row is None else _number(row["full_batch_ms"]))
        lines.append(
            _line([*cells, *(_number(table[k][place]) for k in ("vllm", "limit", "goal"))])
        )
    if not decode and table["variant"] == "bf16":
        what, vllm, goal = START
        ours = f"{documents[0]['start']['first_token_s']:.1f}" if documents else NOT_RUN
        lines.append(_line([what, ours, vllm, "", goal]))
    return lines


def _find(documents: Documents, point: str) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """The newest document with a point's row and the row, or why there is none."""
    missing = NOT_RUN
    for document in documents:
        for row in document["ttft"]:
            if point == f"ttft {row['prompt']}":
                return document, row, ""
        for row in document["decode"]:
            if point == f"decode {row['batch']}x{row['context']}":
                return document, row, ""
        for kind in ("skipped", "failed"):
            if missing == NOT_RUN and any(row["point"] == point for row in document[kind]):
                missing = kind
    return {}, None, missing


def _source(document: dict[str, Any]) -> str:
    """What the table's own figures were measured on."""
    device, start = document["device"], document["start"]
    kernels = f", kernel cache {start['kernel_cache']}" if start["kernel_cache"] else ""
    return (
        f"{document['when'][:10]}, commit {(document['commit'] or 'unknown')[:12]}, "
        f"{device['ranks']} x {device['name']}, torch {document['versions']['torch']}, "
        f"fingerprint {document['fingerprint']['digest']}, "
        f"median of {document['method']['repeats']} (1 for long prompts), warm{kernels}.\n"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the page, or with --check say whether it is up to date."""
    targets = json.loads((BENCHMARKS / "targets.json").read_text(encoding="utf-8"))
    try:
        page = render(targets, load(BENCHMARKS / "results"))
    except ValueError as error:
        sys.exit(str(error))
    path = BENCHMARKS / "RESULTS.md"
    if "--check" not in sys.argv[1:]:
        path.write_text(page, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != page:
        sys.exit(f"{path.name} is not what tools/results.py writes: run it")


if __name__ == "__main__":
    main()
