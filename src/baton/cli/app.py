"""Commands put together, and errors turned into one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

import typer

from baton.cli import bench, chat, doctor, eval, generate, models, serve
from baton.cli.show import errors, out, version
from baton.core import env
from baton.core.errors import BatonError, ConfigError, RequestError

#: exit codes: what the user typed, and everything else
USAGE, FAILURE = 2, 1


def build_app() -> typer.Typer:
    """The typer application with every command."""
    app = typer.Typer(
        name="baton",
        help="Serve large language models with very long prompts, and measure it honestly.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in (serve, generate, chat, models, doctor, bench, eval):
        module.register(app)
    app.command("version")(_version)
    return app


def _version() -> None:
    """Print Baton's version."""
    out.print(version(), highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `baton`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # an answer may hold any character; a terminal or pipe may not know them all
            stream.reconfigure(errors="backslashreplace")
    try:
        for flag in (env.LOG_LEVEL, env.DEBUG):
            flag.get()  # they are read again at moments when an error is hard to show
        build_app()(args=arguments, prog_name="baton")
    except BrokenPipeError:  # the reader of a pipe has gone: end as quietly as other programs
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if _debugging():
            raise
        errors.print(f"baton: {_line(error)}", style="red", markup=False, soft_wrap=True)
        sys.exit(USAGE if isinstance(error, ConfigError | RequestError) else FAILURE)


def _debugging() -> bool:
    try:
        return env.DEBUG.get()
    except ConfigError:
        return False


def _line(error: Exception) -> str:
    if isinstance(error, BatonError):
        return str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: serving models takes more: pip install 'baton-llm[engine]'"
    return f"{type(error).__name__}: {error} ({env.DEBUG.name}=1 shows where)"
