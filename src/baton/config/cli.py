"""Command-line flags made from annotated dataclass sections, and values turned back into them.

A field gives its flag by name (`max_model_len` -> `--max-model-len`), type and help by its
annotation (`Annotated[int | None, "help"]`). `bool` becomes `--x/--no-x`; a `Literal` a choice.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import typer

from baton.config.options import SECTIONS, EngineOptions

T = TypeVar("T")

PANELS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "parallel": "Parallelism",
    "device": "Device",
}
#: spellings beside the field's own
ALIASES = {
    "tensor_parallel_size": ("-tp",),
    "url": ("--base-url",),  # as other clients call it
}
NO_DEFAULTS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class _Field:
    """One dataclass field as typer sees it."""

    name: str
    annotation: Any
    default: Any
    help: str
    is_tuple: bool

    def parameter(self, panel: str) -> inspect.Parameter:
        """A keyword parameter that typer reads as an option."""
        flag = "--" + self.name.replace("_", "-")
        names = (flag, *ALIASES.get(self.name, ()))
        metavar, help_text = None, self.help
        shown: bool | str = True
        # short types and defaults, so that long flags are not cut in the help
        if self.annotation is bool:
            names = (f"{flag}/--no-{flag[2:]}",)
            shown = "on" if self.default else "off"
        elif typing.get_origin(self.annotation) is Literal:
            metavar = "CHOICE"
            help_text += f" ({', '.join(typing.get_args(self.annotation))})"
        option = typer.Option(
            *names, help=help_text, rich_help_panel=panel, metavar=metavar, show_default=shown
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.annotation, option],
        )


def engine_parameters(defaults: Mapping[str, Any] = NO_DEFAULTS) -> list[inspect.Parameter]:
    """Every engine option but the model itself (an argument of the command).

    Args:
        defaults: of this command, by field name, where they differ from the sections' own.
    """
    found: list[inspect.Parameter] = []
    for name, section in SECTIONS.items():
        found += parameters(section, PANELS[name], {"model"}, defaults)
    top = {"model", *SECTIONS}
    return found + parameters(EngineOptions, PANELS["model"], top, defaults)


def parameters(
    section: type[Any],
    panel: str,
    skip: frozenset[str] | set[str] = frozenset(),
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> list[inspect.Parameter]:
    """One option for each field of a dataclass, shown under `panel` in the help."""
    return [
        dataclasses.replace(field, default=defaults.get(field.name, field.default)).parameter(panel)
        for field in _fields(section)
        if field.name not in skip
    ]


def with_parameters(command: Callable[..., T], *extra: list[inspect.Parameter]) -> Callable[..., T]:
    """`command(own arguments, **values)` with `extra` options added to what typer sees.

    The command's `**values` receives the extra options by field name.

    Raises:
        TypeError: two options would share a name.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [parameter for group in extra for parameter in group]
    names = [parameter.name for parameter in own + added]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise TypeError(f"{command.__name__}: options defined twice: {', '.join(twice)}")

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        return command(*args, **kwargs)

    ordered = sorted(own + added, key=lambda p: p.kind)
    wrapper.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in ordered}
    return wrapper


def engine_options(model: str, values: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions from collected values; other commands' values are left alone."""
    names = {parameter.name for parameter in engine_parameters()}
    return EngineOptions.of(model, **{k: v for k, v in values.items() if k in names})


def section_of(section: type[T], values: Mapping[str, Any]) -> T:
    """An instance of a dataclass from collected values, lists back to tuples where it has them."""
    fields = {f.name: f for f in _fields(section)}
    given = {k: v for k, v in values.items() if k in fields}
    return section(**{k: tuple(v) if fields[k].is_tuple else v for k, v in given.items()})


def _fields(section: type[Any]) -> list[_Field]:
    hints = typing.get_type_hints(section, include_extras=True)
    return [_field(field, hints[field.name]) for field in dataclasses.fields(section)]


def _field(field: dataclasses.Field[Any], hint: Any) -> _Field:
    help_text = ""
    if typing.get_origin(hint) is Annotated:
        hint, *notes = typing.get_args(hint)
        help_text = next((note for note in notes if isinstance(note, str)), "")
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    is_tuple = typing.get_origin(hint) is tuple
    if is_tuple:
        hint = types.GenericAlias(list, (typing.get_args(hint)[0],))
        default = list(default or ())
    return _Field(field.name, hint, default, help_text, is_tuple)
