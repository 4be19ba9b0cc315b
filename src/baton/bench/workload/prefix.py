"""Groups of requests with an exact prefix hit: warmed up, cache emptied, primed, measured, and
verified by the load runner."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from baton.bench.workload.job import Job, Workload, WorkloadError
from baton.bench.workload.shapes import short

HITS = (0.0, 0.2, 0.5, 0.8)
#: tokens in a page of the cache; only whole pages are shared
PAGE = 64


def prefix(
    lengths: Sequence[int],
    hits: Sequence[float] = HITS,
    *,
    osl: int = 64,
    requests: int = 8,
    prefixes: int = 2,
    page: int = PAGE,
    concurrency: int = 2,
    seed: int = 0,
) -> Workload:
    """For each prefix length P and hit h: prompts of P / h tokens whose first P are cached; with
    h = 0, prompts of P tokens of which none is.

    Args:
        lengths: prefix lengths in tokens, multiples of `page`.
        hits: shares of prompt tokens in [0, 1).
        requests: of each group, over `prefixes` different prefixes.
        concurrency: requests in flight during warm-up and priming.

    Raises:
        WorkloadError: a length or share that cannot be hit exactly.
    """
    _check(lengths, hits, min(requests, prefixes, osl, page, concurrency), page)
    ids = itertools.count()
    jobs: list[Job] = []
    prime: list[Job] = []
    expected: dict[str, float] = {}
    for length in lengths:
        for hit in hits:
            group = f"{short(length)} {hit:.0%}"
            made, heads = _group(group, length, hit, osl, requests, prefixes, ids)
            jobs += made
            prime += heads
            expected[group] = sum(job.shared for job in made) / sum(job.length for job in made)
    random.Random(seed).shuffle(jobs)
    warm = [Job(((next(ids), min(lengths)),), osl) for _ in range(concurrency)]
    about = {
        "name": "prefix",
        "lengths": list(lengths),
        "hits": list(hits),
        "osl": osl,
        "requests": requests,
        "prefixes": prefixes,
        "block": page,
        "seed": seed,
        "groups": list(expected),
    }
    return Workload(
        jobs,
        about,
        before=(("warm", warm), ("prime", prime)),
        before_concurrency=concurrency,
        reset=True,
        expected_hit=expected,
    )


def _check(lengths: Sequence[int], hits: Sequence[float], least: int, page: int) -> None:
    if least < 1:
        raise WorkloadError("requests, prefixes, osl, page and concurrency must be at least 1")
    for length in lengths:
        if length < page or length % page:
            raise WorkloadError(
                f"prefix length {length} is no multiple of the cache's page of {page} tokens"
            )
    if not all(0 <= hit < 1 for hit in hits):
        raise WorkloadError(f"hits must be from 0 to below 1, got {list(hits)}")


def _group(
    name: str,
    length: int,
    hit: float,
    osl: int,
    requests: int,
    prefixes: int,
    ids: Iterator[int],
) -> tuple[list[Job], list[Job]]:
    """A group's requests and those that fill the cache for it."""
    if not hit:
        return [Job(((next(ids), length),), osl, group=name) for _ in range(requests)], []
    rest = max(1, round(length / hit) - length)
    heads = [(next(ids), length) for _ in range(min(prefixes, requests))]
    jobs = [
        Job((heads[i % len(heads)], (next(ids), rest)), osl, group=name, shared=length)
        for i in range(requests)
    ]
    # one token more than the prefix: its last page is computed too, and may be shared
    return jobs, [Job((head, (next(ids), 1)), 1, group=name) for head in heads]
