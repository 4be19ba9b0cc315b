"""Writes docs/reference/ from the code, or with --check says whether it is up to date."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo

from baton.bench.report.document import json_schema
from baton.cli.app import build_app
from baton.core.sampling import SamplingParams
from baton.server import schemas
from baton.server.app import create_app
from baton.server.metrics import Metrics
from baton.server.options import ServerOptions

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
NOTE = "Written by `tools/reference.py` from the code; change it there.\n"
#: what the Python page shows, and in which order
API = {
    "engine/llm.py": "LLM",
    "core/sampling.py": "SamplingParams",
    "core/request.py": "Output Completion FinishReason PositionLogprobs TokenLogprob Timing",
    "engine/async_engine.py": "AsyncEngine",
    "engine/stream.py": "Stream",
    "core/stats.py": "EngineStats",
    "core/errors.py": "BatonError ConfigError ModelError FingerprintMismatch RequestError "
    "QueueFull Unavailable RequestFailed",
}
#: public for the engine's other rooms only
INNER = ("AsyncEngine.forget", "Stream.put", "Stream.fail")


def cli() -> str:
    """Every command and flag."""
    parts = [f"# Command line\n\n{NOTE}"]
    for path, command in _commands("baton", build_app()):
        panels: dict[str, list[list[str]]] = {}
        arguments = []
        for param in inspect.signature(command.callback, eval_str=True).parameters.values():
            kind, info = typing.get_args(param.annotation)
            row = _flag(param, kind, info)
            if isinstance(info, ArgumentInfo):
                row = [info.metavar, "", info.help or ""]
                arguments.append(info.metavar if param.default is param.empty else f"[{row[0]}]")
            panels.setdefault(info.rich_help_panel or "Options", []).append(row)
        parts.append(f"## {path}\n\n```\n{' '.join([path, *arguments])} [OPTIONS]\n```\n")
        parts.append(_prose(inspect.getdoc(command.callback) or ""))
        parts += [_table([panel, "default", "what"], rows) for panel, rows in panels.items()]
        if command.epilog:
            lines = re.sub(r"\n\n *", "\n", command.epilog).partition("\n")[2]
            parts.append(f"```\n{lines}\n```\n")
    return "\n".join(parts)


def _commands(path: str, app: typer.Typer) -> Iterator[tuple[str, Any]]:
    for command in app.registered_commands:
        yield f"{path} {command.name}", command
    for group in app.registered_groups:
        yield from _commands(f"{path} {group.name}", group.typer_instance)


def _flag(param: inspect.Parameter, kind: Any, info: Any) -> list[str]:
    # typer takes the first name for the default until a command is built
    given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    names = ", ".join(f"`{name}`" for name in given or ["--" + param.name.replace("_", "-")])
    if kind is bool:
        return [names, "on" if param.default else "off", info.help or ""]
    word = re.findall(r"int|float|str|Path", str(kind))
    metavar = info.metavar or word[0].upper().replace("STR", "TEXT")
    default = "" if param.default in (None, ()) or param.default == [] else f"`{param.default}`"
    return [f"{names} {metavar}", default, info.help or ""]


def api() -> str:
    """The public classes, from their source."""
    parts = [f"# Python API\n\n{NOTE}"]
    for file, names in API.items():
        tree = ast.parse((ROOT / "src" / "baton" / file).read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        module = "baton." + file.removesuffix(".py").replace("/", ".")
        for name in names.split():
            parts += _class(classes[name], module)
    return "\n".join(parts)


def _class(node: ast.ClassDef, module: str) -> list[str]:
    text = ast.get_docstring(node) or ""
    told, parts = _told(text), [f"## {node.name}\n\n`{module}.{node.name}`\n"]
    fields, methods = [], []
    for item in node.body:
        full = f"{node.name}.{getattr(item, 'name', '')}"
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            name, kind = ast.unparse(item.target), f"`{ast.unparse(item.annotation)}`"
            default = f"`{ast.unparse(item.value)}`" if item.value else ""
            fields.append([name, kind, default, told.get(name, "")])
        elif isinstance(item, ast.Assign):
            fields.append([ast.unparse(item.targets[0]), "", f"`{ast.unparse(item.value)}`", ""])
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and full not in INNER:
            if item.name == "__init__" and "Args:" in text:
                parts.append(f"{_signature(item).replace('__init__', node.name)}\n")
            elif not item.name.startswith("_"):
                methods.append(f"### {full}\n\n{_signature(item)}\n")
                methods.append(_prose(ast.get_docstring(item) or ""))
    parts.append(_prose(text, [field[0] for field in fields]))
    parts += [_table(["field", "type", "default", "what"], fields)] if fields else []
    return parts + methods


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    args = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    back = "" if node.name == "__init__" else f" -> {ast.unparse(node.returns or ast.Tuple())}"
    shown = f"{word}{node.name}({args}){back}"
    if any("property" in ast.unparse(mark) for mark in node.decorator_list):
        shown = shown.replace("() ->", ":")
    return f"```python\n{shown}\n```"


def http() -> str:
    """Routes and the fields of their bodies."""
    parts = [f"# HTTP API\n\n{NOTE}"]
    for path, methods in create_app(None, ServerOptions()).openapi()["paths"].items():
        for method, route in methods.items():
            parts.append(f"## {method.upper()} {path}\n\n{route.get('description', '')}\n")
            for content in route.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                model: Any = getattr(schemas, schema["title"])
                told: dict[str, str] = {}
                for kind in (SamplingParams, *reversed(model.__mro__)):
                    told.update(_told(kind.__doc__ or ""))
                refused = getattr(model, "UNSUPPORTED", ())
                fields = schema["properties"].items()
                rows = [
                    [n, _type(field), told.get(n, "")] for n, field in fields if n not in refused
                ]
                parts.append(_table(["field", "type", "what"], rows))
                names = ", ".join(f"`{name}`" for name in refused)
                parts += [f"Refused when set: {names}.\n"] if refused else []
    return "\n".join(parts)


def metrics() -> str:
    """Every metric of /metrics."""
    named = [(f, "_total" * (f.type == "counter")) for f in Metrics().collect()]
    rows = [[f"`{f.name}{end}`", f.type, f.documentation] for f, end in named]
    return f"# Metrics\n\n{NOTE}\n{_table(['name', 'type', 'what'], rows)}"


def _type(field: dict[str, Any]) -> str:
    kinds = [k for k in field.get("anyOf", [field]) if k.get("type") != "null"]
    return " or ".join(
        f"list of {_type(k['items'])}" if "items" in k else k.get("type", "any") for k in kinds
    )


def _told(text: str) -> dict[str, str]:
    """`name: text` lines of a docstring, with the lines that continue them."""
    found = re.findall(r"^ *(\w+): (.+(?:\n +(?!\w+: ).+)*)", inspect.cleandoc(text), re.MULTILINE)
    return {name: " ".join(what.split()).rstrip(".") for name, what in found}


def _prose(text: str, told: Iterable[str] = ()) -> str:
    """A docstring as Markdown; what is `told` in a table is left out."""
    text = inspect.cleandoc(text)
    for name in told:
        text = re.sub(rf"^ *{name}: .+(?:\n +(?!\w+: ).+)*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(Args|Returns|Raises|Fields):\n", r"\1:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^    (?=\S)", "- ", text, flags=re.MULTILINE)
    return re.sub(r"^    +", "  ", text, flags=re.MULTILINE).strip() + "\n"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table without its empty columns."""
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[row[i].replace("|", r"\|") for i in used] for row in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main() -> None:
    """Write the pages, or with --check name one that is stale."""
    pages = {"cli.md": cli(), "api.md": api(), "http.md": http(), "metrics.md": metrics()}
    pages["bench-summary.schema.json"] = json.dumps(json_schema(), indent=1) + "\n"
    for name, text in pages.items():
        if "--check" not in sys.argv[1:]:
            (PAGES / name).write_text(text, encoding="utf-8")
        elif not (PAGES / name).exists() or (PAGES / name).read_text(encoding="utf-8") != text:
            sys.exit(f"docs/reference/{name} is not what the code says: run `make reference`")


if __name__ == "__main__":
    main()
