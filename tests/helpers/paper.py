"""What a prefix cache would hit on paper: an LRU of pages fed one request after the other."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class PaperHits:
    """Prompt tokens seen, those found cached, and the latter for each request in order."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    per_request: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Share of prompt tokens found in the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def paper_lru(
    prompts: Iterable[Sequence[int]],
    page_size: int,
    num_pages: int | None,
    generated: Sequence[int] | None = None,
) -> PaperHits:
    """Hits of a page-granular LRU prefix cache that serves requests one by one, in order.

    Only full pages are shared, and at least one prompt token is always computed. A finished
    request's pages become the most recent, its first page last, so that leaves are evicted
    before their prefixes.

    Args:
        page_size: tokens per page.
        num_pages: pages of the pool; None for an endless one.
        generated: tokens each request generates, which take pages nobody else shares. The last
            one's KV is never computed. None counts prompts only.
    """
    hits = PaperHits()
    cached: OrderedDict[int, None] = OrderedDict()
    fresh = itertools.count(1)
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    for index, prompt in enumerate(prompts):
        chain = _chain(prompt, page_size, names, fresh)
        usable = (len(prompt) - 1) // page_size
        found = 0
        while found < usable and chain[found] in cached:
            found += 1
        hits.prompt_tokens += len(prompt)
        hits.cached_tokens += found * page_size
        hits.per_request.append(found * page_size)
        if generated is not None:
            full = (len(prompt) + generated[index] - 1) // page_size
            chain += itertools.islice(fresh, max(0, full - len(chain)))
        for page in reversed(chain):
            cached[page] = None
            cached.move_to_end(page)
        while num_pages is not None and len(cached) > num_pages:
            cached.popitem(last=False)
    return hits


def _chain(
    prompt: Sequence[int],
    page_size: int,
    names: dict[tuple[int, tuple[int, ...]], int],
    fresh: Iterator[int],
) -> list[int]:
    """A number for each full page that stands for its tokens and everything before them."""
    chain: list[int] = []
    parent = 0
    for start in range(0, len(prompt) - page_size + 1, page_size):
        key = (parent, tuple(prompt[start : start + page_size]))
        if key not in names:
            names[key] = next(fresh)
        parent = names[key]
        chain.append(parent)
    return chain
