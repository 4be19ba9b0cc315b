"""`baton serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from baton.cli.show import examples
from baton.config.cli import (
    engine_options,
    engine_parameters,
    parameters,
    section_of,
    with_parameters,
)
from baton.server.options import ServerOptions

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder, GGUF file, hub id or embedded name (`baton models list`)."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    command = with_parameters(_serve, parameters(ServerOptions, "Server"), engine_parameters())
    app.command(
        "serve",
        epilog=examples(
            "baton serve smollm2-135m",
            "baton serve ./model --port 9000 --max-model-len 32768",
            "baton serve org/name -tp 2 --gpu-memory-utilization 0.85 --api-key secret",
        ),
    )(command)


def _serve(model: ModelArgument, **values: Any) -> None:
    """Serve a model through the OpenAI API until stopped."""
    options = engine_options(model, values)
    server = section_of(ServerOptions, values)
    from baton.server.app import serve

    raise typer.Exit(serve(server, options))
