"""Which page is free, held, or idle but still worth keeping. Every operation is O(1) per page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence


class PagePool:
    """`num_pages` page ids, each in exactly one of three states.

    free: nobody holds it and its content is worthless.
    held: `refs[page] >= 1` sequences have it in their page table.
    idle: nobody holds it but its content is indexed; the least recently used is evicted first.

    `on_evict(page)` is called when an idle page loses its content. Free pages are handed out in
    ascending order from a fresh pool, so that early page tables are contiguous.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages nobody holds whose content may still be hit."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Pages in at least one page table."""
        return self.num_pages - self.available

    def idle_among(self, pages: Iterable[int]) -> int:
        """By how much holding all of `pages` would reduce `available`."""
        return sum(map(self._idle.__contains__, pages))

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, evicting idle ones if needed; None if there are
        not that many (then nothing changes)."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._on_evict(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more reference to each of some held or idle pages."""
        refs, idle = self._refs, self._idle
        for page in pages:
            if refs[page] == 0:
                del idle[page]
            refs[page] += 1

    def drop(self, pages: Iterable[int], keep: Container[int]) -> list[int]:
        """One reference less to each, in this order. The last one makes a page idle, if it is in
        `keep`, or free; returns those that are free now."""
        refs, idle, freed = self._refs, self._idle, []
        for page in pages:
            refs[page] -= 1
            if refs[page] > 0:
                continue
            if page in keep:
                idle[page] = None
            else:
                freed.append(page)
        self._free += freed
        return freed

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that references equal what `tables` hold and that no page is in two states."""
        counts = [0] * self.num_pages
        for table in tables:
            assert len(set(table)) == len(table), "a page is twice in one page table"
            for page in table:
                counts[page] += 1
        assert counts == self._refs, "page references differ from the page tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._idle.keys(), "a page is free and idle"
        for page, count in enumerate(counts):
            assert (count > 0) != (page in free or page in self._idle), (
                f"page {page} is in no state"
            )
