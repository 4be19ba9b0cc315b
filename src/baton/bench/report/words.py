"""HTML of words, numbers and tables. Each number names its place in the document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from baton.bench.report.forms import NONE, show


class Numbers:
    """Writes numbers of a document, each given by its JSON pointer (RFC 6901)."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def at(self, path: str) -> Any:
        """What a pointer leads to; None where there is nothing."""
        found: Any = self._content
        for part in path.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def write(self, path: str, form: str) -> str:
        """A number, as `<data>` with its path, form and full value; a dash for none."""
        value = self.at(path)
        if value is None:
            return NONE
        return (
            f'<data value="{value!r}" data-path="{escape(path)}" data-form="{form}">'
            f"{show(value, form)}</data>"
        )

    def interval(self, path: str, form: str) -> str:
        """ "low to high" in small letters; nothing where there is no interval."""
        if self.at(path) is None:
            return ""
        low, high = (
            self.write(f"{path}/{end}", form) if self.at(f"{path}/{end}") is not None else "?"
            for end in ("low", "high")
        )
        return f"<small>{low} to {high}</small>"


def pointer(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    main: Sequence[int] = (),
    kind: str = "",
) -> str:
    """A table of HTML cells, the first of each row its head; a row of one cell heads a part of the
    table. main: rows to stress. kind: class of the table."""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = ""
    for i, (first, *rest) in enumerate(rows):
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        if not rest:
            body += f'<tr class="part"><th colspan="{len(heads)}">{first}</th></tr>'
            continue
        stress = ' class="main"' if i in main else ""
        body += f'<tr{stress}><th scope="row">{first}</th>{cells}</tr>'
    return (
        f'<div class="scroll"><table class="{kind}">{title}<thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Names and values, a column for each named mapping; what is equal in all is written once. What
    lies deeper gets dotted names."""
    flat = [dict(_flat(values, "")) for _, values in columns]
    rows = ""
    for name in dict.fromkeys(name for values in flat for name in values):
        values = [escape(column.get(name, NONE)) for column in flat]
        if len(set(values)) == 1:
            cells = f'<td colspan="{len(values)}">{values[0]}</td>'
        else:
            cells = "".join(f"<td>{value}</td>" for value in values)
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in columns)
    return (
        '<div class="scroll"><table class="words"><thead><tr><th></th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", [], {}):
            rows.append((prefix + str(name), _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def paragraph(text: str, kind: str = "") -> str:
    """Plain words as a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"
