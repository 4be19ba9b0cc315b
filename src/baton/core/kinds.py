"""Whether values have the types that a class declares: msgspec checks this when it decodes, nobody
does when a caller makes the object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def wrong_kind(cls: type[Any], values: Mapping[str, Any]) -> tuple[str, str] | None:
    """(field, what is wrong with it) of the first of the values by field that does not have its
    type in `cls`, a dataclass or msgspec.Struct; None if all have."""
    try:
        msgspec.convert(dict(values), cls)
    except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.name[0]`"
        problem, _, where = str(error).replace("`", "").partition(" - at ")
        where = where.replace("$.", "")
        field = where.rpartition(" ")[2].partition("[")[0]
        return field, f"{where}: {problem[0].lower()}{problem[1:]}"
    return None
