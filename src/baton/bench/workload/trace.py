"""Request traces: three forms of file, read with care.

Mooncake JSONL (Qin et al., Mooncake, FAST'25): `{"timestamp": ms, "input_length": tokens,
    "output_length": tokens, "hash_ids": [...]}`, an id for each block of 512 prompt tokens, the
    last one for the partial tail. Equal ids are the same block after the same prefix.
Azure CSV (Patel et al., Splitwise, ISCA 2024): `TIMESTAMP,ContextTokens,GeneratedTokens`; prompts
    share nothing.
Baton JSONL: `{"at": seconds, "input": tokens, "output": tokens}`; instead of `input`, `segments` as
    [[id, tokens], ...]; optional `group`, `session`, `turn`, `think`. A session's lines after its
    first are sent `think` seconds after the answer before, whatever their time.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from baton.bench.workload.job import Job
from baton.core.errors import ConfigError

BLOCK = 512
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceError(ConfigError):
    """A trace file is not what it should be; names the file and the line."""


def read_trace(path: str | Path, limit: int | None = None) -> list[Job]:
    """The first `limit` requests of a trace file (all when None), as the file has them.

    Raises:
        TraceError: naming the line, for anything that is not a valid request.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            return _parse(lines, str(path), limit)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"{path}: cannot be read: {reason}") from None


def _parse(lines: Iterable[str], name: str, limit: int | None) -> list[Job]:
    jobs: list[Job] = []
    parse: Callable[[str, int], Job] | None = None
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(jobs) >= limit:
            break
        if not line.strip():
            continue
        try:
            if parse is None:
                parse = _form(line)
                if parse is _azure:
                    continue
            job = parse(line, len(jobs))
            if jobs and job.at is not None and job.at < (jobs[-1].at or 0.0):
                raise ValueError("its time is before that of the line above")
        except ValueError as error:
            raise TraceError(f"{name}:{number}: {error}") from None
        jobs.append(job)
    if not jobs:
        raise TraceError(f"{name}: no requests in it")
    if len({job.at is None for job in jobs}) > 1:
        raise TraceError(f"{name}: some lines have a time and others have none")
    return jobs


def _form(line: str) -> Callable[[str, int], Job]:
    """What reads the lines of a file that begins with this one."""
    if not line.lstrip().startswith("{"):
        if [cell.strip() for cell in line.split(",")] == AZURE:
            return _azure
        raise ValueError(
            f"neither a JSON object nor the header {','.join(AZURE)}: {line.strip()[:60]!r}"
        )
    row = _object(line)
    return _mooncake if {"timestamp", "input_length", "hash_ids"} & row.keys() else _own


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    return row


def _mooncake(line: str, number: int) -> Job:
    row = _object(line)
    length = _count(row, "input_length", least=1)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise ValueError("hash_ids must be a list of non-negative integers")
    expected = -(-length // BLOCK)
    if len(ids) != expected:
        raise ValueError(
            f"hash_ids has {len(ids)} ids, but {length} tokens are {expected} blocks of {BLOCK}"
        )
    at = _count(row, "timestamp", least=0) / 1000
    return Job(blocks(ids, length), _count(row, "output_length", least=1), at)


def blocks(ids: Sequence[int], length: int) -> tuple[tuple[int, int], ...]:
    """Segments of `BLOCK` tokens, the last one with what is left of `length`."""
    last = length - BLOCK * (len(ids) - 1)
    return (*((i, BLOCK) for i in ids[:-1]), (ids[-1], last))


def _azure(line: str, number: int) -> Job:
    cells = next(csv.reader([line]))
    if len(cells) != len(AZURE):
        raise ValueError(f"expected {len(AZURE)} columns, got {len(cells)}")
    row: dict[str, Any] = dict(zip(AZURE, cells, strict=True))
    for name in AZURE[1:]:
        row[name] = int(row[name]) if row[name].strip().isdecimal() else row[name]
    try:
        # ten millionths of a second; datetime takes six digits
        stamp = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
    except ValueError:
        raise ValueError(f"TIMESTAMP {row['TIMESTAMP']!r} is no date and time") from None
    at = (stamp.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
    length = _count(row, "ContextTokens", least=1)
    # a few of the published rows generated nothing
    output = _count(row, "GeneratedTokens", least=0)
    return Job(((number, length),), max(output, 1), at)


def _own(line: str, number: int) -> Job:
    row = _object(line)
    known = {"at", "input", "output", "segments", "group", "session", "turn", "think"}
    if unknown := sorted(row.keys() - known):
        raise ValueError(f"unknown field {unknown[0]!r}: expected some of {', '.join(known)}")
    if ("input" in row) == ("segments" in row):
        raise ValueError("expected either input or segments")
    segments = row.get("segments")
    if segments is None:
        # ids of a range of their own: they never meet those that segments name
        segments = [[2**40 + number, _count(row, "input", least=1)]]
    if not (
        isinstance(segments, list)
        and segments
        and all(isinstance(s, list) and len(s) == 2 for s in segments)
        and all(type(i) is int and type(n) is int and 0 <= i < 2**63 and n > 0 for i, n in segments)
    ):
        raise ValueError("segments must be a list of [id, tokens], ids from 0 and tokens from 1")
    session, turn = (_count(row, n, 0) if n in row else None for n in ("session", "turn"))
    return Job(
        tuple((i, n) for i, n in segments),
        _count(row, "output", least=1),
        _seconds(row, "at") if "at" in row else None,
        group=str(row.get("group", "")),
        session=session,
        turn=turn,
        think=_seconds(row, "think") if "think" in row else 0.0,
    )


def _count(row: dict[str, Any], key: str, least: int) -> int:
    if key not in row:
        raise ValueError(f"{key} is missing")
    value = row[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be an integer of at least {least}, got {value!r}")
    return value


def _seconds(row: dict[str, Any], key: str) -> float:
    value = row[key]
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{key} must be a number of seconds from 0, got {value!r}")
    return float(value)


def write_trace(path: str | Path, jobs: Iterable[Job]) -> None:
    """Write requests of whole blocks in Mooncake's form; times are rounded to milliseconds."""
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(_lines(jobs))


def _lines(jobs: Iterable[Job]) -> Iterator[str]:
    for job in jobs:
        row = {
            "timestamp": round((job.at or 0.0) * 1000),
            "input_length": job.length,
            "output_length": job.max_tokens,
            "hash_ids": [number for number, _ in job.segments],
        }
        yield json.dumps(row) + "\n"
