"""Flags are the dataclass fields, and come back as dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from baton.config.cli import (
    engine_options,
    engine_parameters,
    parameters,
    section_of,
    with_parameters,
)
from baton.config.options import SECTIONS, EngineOptions


def parse(*arguments: str) -> EngineOptions:
    """What a command with the engine's flags makes of a command line."""
    got: list[EngineOptions] = []

    def command(model: str, **values: Any) -> None:
        got.append(engine_options(model, values))

    app = typer.Typer()
    app.command()(with_parameters(command, engine_parameters()))
    result = CliRunner().invoke(app, ["m", *arguments])
    assert result.exit_code == 0, result.output
    return got[0]


def test_no_flags_are_the_defaults() -> None:
    assert parse() == EngineOptions.of("m")


def test_every_field_has_its_flag() -> None:
    names = {p.name for p in engine_parameters()}
    fields = {f.name for s in SECTIONS.values() for f in dataclasses.fields(s)}
    assert names == fields - {"model"} | {"expect_fingerprint"}


@pytest.mark.parametrize(
    "arguments, flat",
    [
        (["--tensor-parallel-size", "2"], {"tensor_parallel_size": 2}),
        (["-tp", "4"], {"tensor_parallel_size": 4}),
        (["--max-model-len", "4096"], {"max_model_len": 4096}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--kv-cache-dtype", "float16"], {"kv_cache_dtype": "float16"}),
        (["--block-size", "32"], {"block_size": 32}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--enable-prefix-caching"], {}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--skip-tokenizer-init"], {"skip_tokenizer_init": True}),
        (["--max-num-batched-tokens", "64"], {"max_num_batched_tokens": 64}),
        (["--max-num-seqs", "8", "--dtype", "bfloat16"], {"max_num_seqs": 8, "dtype": "bfloat16"}),
        (["--load-format", "dummy", "--seed", "3"], {"load_format": "dummy", "seed": 3}),
        (["--attention-backend", "torch,torch"], {"attention_backend": "torch,torch"}),
        (["--expect-fingerprint", "abc"], {"expect_fingerprint": "abc"}),
    ],
)
def test_flags_become_options(arguments: list[str], flat: dict[str, Any]) -> None:
    assert parse(*arguments) == EngineOptions.of("m", **flat)


@dataclass(frozen=True)
class Section:
    need: Annotated[int, "a needed number"]
    names: Annotated[tuple[str, ...], "names"] = ()
    level: Annotated[Literal["low", "high"], "a level"] = "low"
    loud: Annotated[bool, "be loud"] = False


def section_app(seen: list[Section]) -> typer.Typer:
    def command(**values: Any) -> None:
        seen.append(section_of(Section, values))

    app = typer.Typer()
    app.command()(with_parameters(command, parameters(Section, "A panel")))
    return app


def test_any_annotated_dataclass_works() -> None:
    seen: list[Section] = []
    run = CliRunner().invoke
    arguments = ["--need", "1", "--names", "a", "--names", "b", "--level", "high", "--loud"]
    assert run(section_app(seen), arguments).exit_code == 0
    assert seen == [Section(1, ("a", "b"), "high", True)]
    assert run(section_app(seen), []).exit_code == 2
    bad = run(section_app(seen), ["--need", "1", "--level", "middle"])
    assert bad.exit_code == 2
    assert "low" in bad.output
    text = run(section_app(seen), ["--help"], env={"COLUMNS": "100"}).output
    for word in ("A panel", "--need", "be loud", "--no-loud"):
        assert word in text


def test_a_name_twice_is_refused_when_the_command_is_made() -> None:
    def command(need: int, **values: Any) -> None: ...

    with pytest.raises(TypeError, match="defined twice: need"):
        with_parameters(command, parameters(Section, "p"))
