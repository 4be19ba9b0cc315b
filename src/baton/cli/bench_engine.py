"""`baton bench engine`: an engine in this process, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.serve import ModelArgument
from baton.cli.show import WIDTH, errors, examples, out
from baton.config.cli import engine_options, engine_parameters, with_parameters
from baton.core.errors import ConfigError

#: token ids only; no prompt may be answered from another; no pace for readers to be kept
DEFAULTS = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "step_time": "1h"}
PANEL = "Measurement"


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command(
        "engine",
        epilog=examples(
            "baton bench engine smollm2-135m --ttft 128,512 --decode 1x128,8x128",
            "baton bench engine ./moonlight-16b --load-format dummy --out moonlight.json",
            'baton bench engine ./model --ttft "" --decode 8x65536 --profile traces/',
        ),
    )(with_parameters(_engine, engine_parameters(DEFAULTS)))


def _engine(
    model: ModelArgument,
    ttft: Annotated[
        str | None,
        typer.Option(help="Prompt lengths, as 1024,4096.", rich_help_panel=PANEL),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(help="BATCHxCONTEXT pairs, as 1x1024,8x65536.", rich_help_panel=PANEL),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(help="Timings of a point; one if it has long prompts.", rich_help_panel=PANEL),
    ] = 3,
    budget: Annotated[
        float,
        typer.Option(
            help="Seconds after which the points that are left are skipped.", rich_help_panel=PANEL
        ),
    ] = 480.0,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Also write JSON here.", rich_help_panel=PANEL)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Folder for GPU traces of a few steps of each decode point.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    commit: Annotated[
        str | None,
        typer.Option(help="Commit to record, if not that of the checkout.", rich_help_panel=PANEL),
    ] = None,
    copy_rate: Annotated[
        float | None,
        typer.Option(help="Copy ceiling of the device in TB/s.", rich_help_panel=PANEL),
    ] = None,
    matmul_rate: Annotated[
        float | None, typer.Option(help="Matmul ceiling in TFLOP/s.", rich_help_panel=PANEL)
    ] = None,
    attention_rate: Annotated[
        float | None, typer.Option(help="Attention ceiling in TFLOP/s.", rich_help_panel=PANEL)
    ] = None,
    **values: Any,
) -> None:
    """Time first tokens and decode steps of an engine in this process, without a server.

    Without --ttft and --decode, the grid of the published figures as far as it fits. Exits with 1
    when a point failed.
    """
    from baton.bench.offline.engine import Settings
    from baton.bench.offline.points import decode_points, default_points, ttft_points
    from baton.bench.offline.run import run
    from baton.bench.offline.table import tables

    ceilings = {"copy": copy_rate, "matmul": matmul_rate, "attention": attention_rate}
    if (
        repeats < 1
        or budget < 0
        or any(rate is not None and rate <= 0 for rate in ceilings.values())
    ):
        raise ConfigError("--repeats must be at least 1, --budget 0, and rates above 0")
    default = ttft is None and decode is None
    points = default_points() if default else ttft_points(ttft or "") + decode_points(decode or "")
    if not points:
        raise ConfigError("nothing to measure: give --ttft or --decode a point")
    options = engine_options(model, values)
    settings = Settings(repeats, budget, ceilings, default, profile, commit)
    document = run(options, points, settings, errors, out_file)
    out.print(tables(document), width=min(WIDTH, out.width))
    if out_file is not None:
        errors.print(f"written to {out_file}", style="dim", markup=False)
    raise typer.Exit(1 if document["failed"] else 0)
