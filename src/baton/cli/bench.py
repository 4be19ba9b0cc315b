"""`baton bench ...`: load on servers, and measurements of an engine in this process."""

from __future__ import annotations

import typer

from baton.cli import bench_engine, bench_load, bench_report, bench_slo
from baton.cli.show import examples


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="Measure a server, or an engine in this process.",
        no_args_is_help=True,
        epilog=examples(
            "baton bench run --isl 1K --osl 128 --rate 2 --ttft 4s --tpot 50ms",
            "baton bench replay synthetic --length-scale 1/64",
            "baton bench slo --isl 4K --osl 256 --ttft 4s --tpot 50ms",
            "baton bench report baseline/ fp8/ --out compared/",
            "baton bench engine smollm2-135m --ttft 128,512 --decode 1x128,8x128",
        ),
    )
    bench_load.register(group)
    bench_slo.register(group)
    bench_report.register(group)
    bench_engine.register(group)
    app.add_typer(group, name="bench")
