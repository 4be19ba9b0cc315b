"""What commands share: consoles, examples in help, tables that fit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from baton import __version__

#: tables are no wider, also where there is no terminal to ask
WIDTH = 100

#: answers and tables; notes and errors
out = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else WIDTH)
errors = Console(stderr=True)


def version() -> str:
    """Baton's version."""
    return __version__


def examples(*lines: str) -> str:
    """Examples for the end of a command's help; each stays a line of its own."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of at most WIDTH columns, or of the terminal if that is narrower."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for head in heads:
        made.add_column(head, overflow="fold")
    for row in rows:
        made.add_row(*row)
    out.print(made, width=min(WIDTH, out.width))
