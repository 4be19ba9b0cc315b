"""Fingerprints name the first field that differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from baton.config.fingerprint import Fingerprint, parse_expected
from baton.config.model import GQAConfig, ModelConfig, RopeConfig
from baton.core.errors import ConfigError, FingerprintMismatch
from baton.core.kv import KVShape

MODEL = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    num_layers=3,
    intermediate_size=96,
    attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=16),
    rope=RopeConfig(dim=16, kind="llama3", scaling={"factor": 8.0}),
    norm_eps=1e-5,
    max_position=512,
    raw={"anything": object()},
)


def make(model: ModelConfig = MODEL, page_size: int = 16, tp_size: int = 1) -> Fingerprint:
    shapes = [KVShape(2, 16, 16), KVShape(2, 16, 16), KVShape(1, 80, 64, shared_value=True)]
    return Fingerprint.of(
        engine="0.1.0",
        model=model,
        weights="a" * 64,
        tokenizer="b" * 64,
        dtype="float32",
        kv_dtype="float32",
        page_size=page_size,
        kv_shapes=shapes,
        tp_size=tp_size,
    )


def test_fields_read_well() -> None:
    print_ = make()
    assert print_.kv_layout == "2 x 2x(16+16), 1 x 1x(80+shared)"
    assert print_.rope == "llama3 theta=10000.0 dim=16 factor=8.0"
    assert len(print_.digest) == 16


def test_the_raw_config_does_not_matter_but_the_shape_does() -> None:
    assert make() == make(dataclasses.replace(MODEL, raw={}))
    other = make(dataclasses.replace(MODEL, norm_eps=1e-6))
    with pytest.raises(FingerprintMismatch, match="'config'"):
        make().require(other)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Fingerprint)])
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    ours = make()
    value = getattr(ours, field)
    theirs = dataclasses.replace(ours, **{field: value + (1 if isinstance(value, int) else "x")})
    ours.require(ours)
    assert ours.digest != theirs.digest
    with pytest.raises(FingerprintMismatch) as caught:
        ours.require(theirs)
    assert caught.value.field == field
    assert caught.value.ours == str(value)


def test_the_first_field_is_named() -> None:
    with pytest.raises(FingerprintMismatch, match=r"'page_size'.*'16'.*'64'"):
        make().require(make(page_size=64, tp_size=2))


def test_expected_as_json_file_or_digest(tmp_path: Path) -> None:
    ours = make()
    text = json.dumps(ours.to_dict())
    file = tmp_path / "fingerprint.json"
    file.write_text(text)
    for given in (text, str(file), f" {ours.digest}\n"):
        ours.require(parse_expected(given))
    with pytest.raises(FingerprintMismatch, match="'digest'"):
        ours.require(parse_expected("0" * 16))
    assert parse_expected(text) == ours


@pytest.mark.parametrize("text", ["", "/no/such/file.json", "{", "{}", "[]", "\0"])
def test_expected_that_is_nothing(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_expected(text)


@pytest.mark.parametrize(
    "change, problem",
    [({"extra": 1}, "unknown fields"), ({"page_size": "16"}, "not a int"), ({"dtype": 1}, "str")],
)
def test_dicts_that_are_no_fingerprints(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Fingerprint.from_dict(make().to_dict() | change)


def test_file_with_a_list(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        parse_expected(str(tmp_path / "f"))
