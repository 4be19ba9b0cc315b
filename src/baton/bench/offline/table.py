"""An engine measurement for people: tables of at most 100 columns, and the file of record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.core.units import format_bytes


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write the JSON, making its folder; an interrupted run leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def tables(document: dict[str, Any]) -> RenderableType:
    """What it ran on, first tokens, decode steps, and what is missing."""
    parts: list[RenderableType] = [_about(document)]
    if document["ttft"]:
        heads = ("prompt", "ms", "least", "of", "steps", "host ms", "limit ms", "share", "bound by")
        rows = [_ttft(row) for row in document["ttft"]]
        parts.append(_table("Time to first token", heads, rows))
    if document["decode"]:
        heads = (
            "batch x context", "ms/step", "of", "full batch", "p90", "host ms", "experts",
            "limit ms", "share",
        )  # fmt: skip
        rows = [_decode(row) for row in document["decode"]]
        parts.append(_table("Decode", heads, rows))
        parts += _profiles(document["decode"])
    for kind, style in (("skipped", "yellow"), ("failed", "red")):
        for row in document[kind]:
            parts.append(Text(f"{kind}: {row['point']}: {row['reason']}", style=style))
    return Group(*parts)


def _about(document: dict[str, Any]) -> Table:
    versions, device, hardware = (document[k] for k in ("versions", "device", "hardware"))
    backends, start, memory = (document[k] for k in ("backends", "start", "memory"))
    peak = memory["device_peak_bytes"]
    kernels = f", kernel cache {start['kernel_cache']}" if start["kernel_cache"] else ""
    rates = ", ".join(f"{hardware[k]:.3g} {k}" for k in ("copy", "matmul", "attention"))
    made = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for label, value in (
        ("Model", f"{document['model']['name']} ({document['config']['load_format']} weights)"),
        ("Device", f"{device['ranks']} x {device['name']}"),
        ("Ceilings", f"{rates} (TB/s, TFLOP/s, TFLOP/s; {hardware['source']})"),
        ("Code", f"Baton {document['baton']}, commit {(document['commit'] or 'unknown')[:12]}"),
        ("Packages", f"torch {versions['torch']}, triton {versions['triton']}"),
        ("Fingerprint", document["fingerprint"]["digest"]),
        ("Backends", ", ".join(f"{name} {value}" for name, value in backends.items())),
        ("Start", f"{start['first_token_s']:.1f} s from process start to first token{kernels}"),
        (
            "Passes",
            f"{document['passes']['graph']:,} through CUDA graphs, "
            f"{document['passes']['eager']:,} kernel by kernel",
        ),
        (
            "Peak memory",
            f"{'no' if peak is None else format_bytes(peak)} device, "
            f"{format_bytes(memory['host_peak_bytes'])} host",
        ),
    ):
        made.add_row(label, value)
    return made


def _ttft(row: dict[str, Any]) -> list[str]:
    roof = row["roofline"]
    return [
        f"{row['prompt']:,}",
        _ms(row["ms"]),
        _ms(min(row["samples_ms"])),
        str(row["repeats"]),
        str(row["steps"]),
        _ms(row["host_ms"]),
        _ms(roof["limit_ms"]),
        f"{roof['share']:.0%}",
        "memory" if roof["memory_ms"] > roof["compute_ms"] else "compute",
    ]


def _decode(row: dict[str, Any]) -> list[str]:
    roof, experts = row["roofline"], row["experts"]
    mark = "~" if experts["source"] == "expected" else ""
    return [
        f"{row['batch']}x{row['context']}",
        _ms(row["ms"]),
        str(row["repeats"]),
        _ms(row["full_batch_ms"]),
        _ms(row["full_batch_p90_ms"]),
        _ms(row["host_ms"]),
        f"{mark}{experts['mean']:.1f}" if experts["mean"] else "-",
        _ms(roof["limit_ms"]),
        f"{roof['share']:.0%}",
    ]


def _profiles(rows: Iterable[dict[str, Any]]) -> list[RenderableType]:
    """Idle share and kernels of the decode points that were traced."""
    parts: list[RenderableType] = []
    for row in rows:
        profile = row["profile"]
        if profile is None:
            continue
        title = (
            f"GPU during {row['batch']}x{row['context']}: idle {profile['idle_share']:.1%}, "
            f"of it without work {profile['waiting_share']:.1%}, "
            f"longest gap {profile['longest_gap']:.0f} us, about {profile['steps']} steps"
        )
        kernels = [
            (name[:72], f"{time / profile['busy']:.0%}", f"{time:,.0f}")
            for name, time in profile["kernels"].items()
        ]
        parts.append(_table(title, ("kernel", "share", "us"), kernels))
    return parts


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    for number, head in enumerate(heads):
        made.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def _ms(value: float | None) -> str:
    """Milliseconds with three or four digits that matter."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
