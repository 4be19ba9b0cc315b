"""`baton doctor [MODEL]`: what this machine is, what would be chosen on it, and why."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.show import examples, out, table, version
from baton.config.cli import engine_options, engine_parameters, with_parameters
from baton.config.engine import EngineConfig
from baton.config.machine import measure_machine
from baton.core import env
from baton.core.units import format_bytes

if TYPE_CHECKING:
    from baton.attention.backend import Attention
    from baton.core.kv import KVShape
    from baton.engine.build import Prepared

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "safetensors", "gguf")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "doctor",
        epilog=examples(
            "baton doctor",
            "baton doctor smollm2-135m --max-model-len 4096",
            "baton doctor ./model -tp 2 --json",
        ),
    )(with_parameters(_doctor, engine_parameters()))


def _doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Also say how this model would be run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **values: Any,
) -> None:
    """Show the machine, and every decision for a model with its reason."""
    report: dict[str, Any] = {
        "machine": asdict(measure_machine(values["device"])),
        "versions": _versions(),
        "environment": {flag.name: str(_shown(flag)) for flag in env.ALL},
    }
    if model is not None:
        from baton.engine.build import prepare

        report |= _model_report(prepare(engine_options(model, values)))
    if as_json:
        print(json.dumps(report, indent=1))
        return
    _print(report)


def _versions() -> dict[str, str]:
    found = {"baton": version(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _shown(flag: env.Flag[Any]) -> Any:
    """A flag's value; a key only says whether it is set."""
    value = flag.get()
    return ("set" if value else "not set") if flag is env.API_KEY else value


def _model_report(prepared: Prepared) -> dict[str, Any]:
    from baton.models import registry
    from baton.parallel.group import ShapeGroup

    config = prepared.config
    group = ShapeGroup(config.tensor_parallel_size)
    model = registry.build(
        config.model, config.dtype, config.device, group, config.attention_backend
    )
    shown = {k: v for k, v in vars(config).items() if k not in {"model", "decisions"}}
    return {
        "model": {
            "name": prepared.source.name,
            "path": str(prepared.source.path),
            "family": config.model.family,
            "layers": config.model.num_layers,
        },
        "config": shown,
        "decisions": [asdict(decision) for decision in config.decisions],
        "attention": _attention(model.attention),
        "kv": _kv(config, model.kv_shapes),
        "fingerprint": _fingerprint(prepared, model.kv_shapes),
    }


def _attention(attention: Attention) -> dict[str, Any]:
    """Which backend serves which half of a step, and what each one says against itself."""
    from baton.attention.backend import ATTENTION

    names = {name: ATTENTION.get(name) for name in ATTENTION.names()}
    kinds = {kind: name for name, kind in names.items()}
    return {
        "prefill": kinds[type(attention.prefill)],
        "decode": kinds[type(attention.decode)],
        "against": {name: kind.why_not(attention.prefill.need) for name, kind in names.items()},
        "halves": {name: list(kind.halves) for name, kind in names.items()},
    }


def _kv(config: EngineConfig, shapes: list[KVShape]) -> dict[str, int]:
    from baton.kv.format import bytes_per_page

    page = bytes_per_page(shapes, config.page_size, config.kv_dtype)
    return {
        "bytes_per_token": page // config.page_size,
        "pages": config.num_pages,
        "tokens": config.num_pages * config.page_size,
        "bytes": config.num_pages * page,
    }


def _fingerprint(prepared: Prepared, shapes: list[KVShape]) -> dict[str, Any]:
    from baton.engine.build import fingerprint_of, read_tokenizer

    tokenizer = read_tokenizer(prepared)
    digest = "" if tokenizer is None else tokenizer.digest
    found = fingerprint_of(prepared, shapes, digest)
    return {"digest": found.digest, **found.to_dict()}


def _print(report: dict[str, Any]) -> None:
    machine = report["machine"]
    rows = [
        ("device", f"{machine['device']}: {machine['num_devices']} x {machine['device_name']}"),
        ("cores", str(machine["cores"])),
        ("memory available", format_bytes(machine["host_memory"])),
    ]
    if machine["device"] != "cpu":  # where it is the same memory
        rows.append(("device memory free", format_bytes(machine["device_memory"])))
    table("Machine", ("what", "here"), rows)
    table("Versions", ("package", "version"), report["versions"].items())
    table("Environment", ("variable", "value"), report["environment"].items())
    if "model" in report:
        _print_model(report)


def _print_model(report: dict[str, Any]) -> None:
    table("Model", ("what", "value"), [(k, str(v)) for k, v in report["model"].items()])
    reasons = {d["name"]: (d["value"], d["reason"]) for d in report["decisions"]}
    table(
        "Decisions",
        ("name", "value", "why"),
        [(name, value, reason) for name, (value, reason) in reasons.items()],
    )
    attention = report["attention"]
    table(
        "Attention backends",
        ("backend", "can", "serves", "against"),
        [
            (
                name,
                "/".join(attention["halves"][name]),
                ", ".join(h for h in ("prefill", "decode") if attention[h] == name) or "-",
                "; ".join(against) or "nothing",
            )
            for name, against in attention["against"].items()
        ],
    )
    kv = report["kv"]
    pool = "measured after loading"
    if kv["pages"]:
        pool = f"{kv['pages']} pages, {kv['tokens']:,} tokens, {format_bytes(kv['bytes'])}"
    table(
        "KV cache (each rank)",
        ("what", "value"),
        [("per token", format_bytes(kv["bytes_per_token"])), ("pool", pool)],
    )
    rows = [(name, str(value)) for name, value in report["fingerprint"].items()]
    table("Fingerprint", ("field", "value"), rows)
    out.print()
