"""Rendering chat templates (Jinja, in a sandbox) the way transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import RequestError


class ChatTemplate:
    """A model's chat templates. Thread-safe.

    Args:
        templates: by name; "default" is used, or "tool_use" when tools are given and it exists.
        special: `bos_token`, `eos_token` and so on, as the templates see them.
    """

    def __init__(self, templates: Mapping[str, str], special: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self._special = dict(special)

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """The conversation as one prompt; `values` go to the template (`tools`, `documents`, ...).

        Raises:
            RequestError: no template, messages that are none, or the template refused them.
        """
        _check(messages)
        template = self._pick(values.get("tools"))
        given = {"tools": None, "documents": None, **self._special, **values}
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except RecursionError:
            raise _refused("the messages are nested too deeply") from None
        except jinja2.TemplateError as error:
            raise _refused(f"the chat template refused the messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise _refused(
                f"the chat template cannot render these messages ({type(error).__name__}: {error})"
            ) from None

    def _pick(self, tools: Any) -> jinja2.Template:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise _refused(
                "this model has no chat template: send a prompt to the completions endpoint"
            )
        compiled = self._compiled[name]
        if isinstance(compiled, str):
            raise _refused(compiled)
        return compiled

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template | str]:
        """Name -> template, or what is wrong with it."""
        environment = _environment()
        compiled: dict[str, jinja2.Template | str] = {}
        for name, text in self.templates.items():
            try:
                compiled[name] = environment.from_string(text)
            except jinja2.TemplateError as error:
                compiled[name] = f"this model's chat template does not compile: {error}"
        return compiled


def _refused(message: str) -> RequestError:
    return RequestError(message, param="messages")


def _check(messages: list[dict[str, Any]]) -> None:
    if not isinstance(messages, list) or not messages:
        raise _refused("messages must be a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refused(f"messages[{index}] must be an object with a role")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
