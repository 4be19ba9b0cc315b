"""What must be the same for two engines to share KV, or for one to be the engine somebody meant."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.config.model import ModelConfig, RopeConfig
from baton.core.errors import ConfigError, FingerprintMismatch

if TYPE_CHECKING:  # core.kv imports torch, which a reader of fingerprints does not need
    from baton.core.kv import KVShape


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a running engine. Fields are short texts and numbers, compared one by one.

    `config` is a digest of the model's shape, `weights` and `tokenizer` of their files, `rope`
    the rotary rule in words. `kv_layout` is the shape of what one token stores on one rank, by
    layers; `tp_size` how many ranks share each layer.
    """

    engine: str
    family: str
    config: str
    weights: str
    tokenizer: str
    rope: str
    dtype: str
    kv_dtype: str
    page_size: int
    kv_layout: str
    tp_size: int

    @staticmethod
    def of(
        *,
        engine: str,
        model: ModelConfig,
        weights: str,
        tokenizer: str,
        dtype: str,
        kv_dtype: str,
        page_size: int,
        kv_shapes: Sequence[KVShape],
        tp_size: int,
    ) -> Fingerprint:
        """The fingerprint of an engine.

        Args:
            engine: Baton's version.
            weights: `models.source.weights_digest`.
            tokenizer: `Tokenizer.digest`, or "" when the engine has none.
            page_size: tokens per KV page.
            kv_shapes: one per layer, of one rank.
        """
        shape = asdict(model)
        del shape["raw"]  # says the same in the family's own words, and much that does not matter
        return Fingerprint(
            engine=engine,
            family=model.family,
            config=_sha(shape)[:16],
            weights=weights[:16],
            tokenizer=tokenizer[:16],
            rope=_rope(model.rope),
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            kv_layout=_layout(kv_shapes),
            tp_size=tp_size,
        )

    @property
    def digest(self) -> str:
        """16 hex digits over all fields."""
        return _sha(self.to_dict())[:16]

    def to_dict(self) -> dict[str, str | int]:
        """Field name -> value, ready for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Fingerprint:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a field is missing, unknown, or of another type.
        """
        types = {field.name: field.type for field in fields(Fingerprint)}
        extra, missing = sorted(set(values) - set(types)), sorted(set(types) - set(values))
        if extra or missing:
            raise ConfigError(
                f"not a fingerprint: unknown fields {extra}, missing fields {missing}"
            )
        for name, kind in types.items():
            if type(values[name]).__name__ != kind:
                raise ConfigError(f"fingerprint field {name!r} is {values[name]!r}, not a {kind}")
        return Fingerprint(**values)

    def require(self, expected: Fingerprint | str) -> None:
        """Refuse to go on unless this fingerprint is the expected one (or has that digest).

        Raises:
            FingerprintMismatch: naming the first field that differs, in the order above.
        """
        if isinstance(expected, str):
            if expected != self.digest:
                raise FingerprintMismatch("digest", self.digest, expected)
            return
        theirs = expected.to_dict()
        for name, ours in self.to_dict().items():
            if ours != theirs[name]:
                raise FingerprintMismatch(name, str(ours), str(theirs[name]))


def parse_expected(text: str) -> Fingerprint | str:
    """What `--expect-fingerprint` says: JSON text, the path of a JSON file, or a digest.

    Raises:
        ConfigError: it is none of these.
    """
    text = text.strip()
    if len(text) == 16 and all(char in "0123456789abcdef" for char in text):
        return text
    if not text.startswith("{"):
        try:
            text = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"expect_fingerprint {text!r} is neither JSON, nor a digest of 16 hex digits, "
                f"nor a file that can be read ({error})"
            ) from None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"expect_fingerprint is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("expect_fingerprint must be a JSON object")
    return Fingerprint.from_dict(values)


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _rope(rope: RopeConfig) -> str:
    """`"default theta=10000.0 dim=64"`, with the scaling's parameters when there are any."""
    parts = [rope.kind, f"theta={rope.theta}", f"dim={rope.dim}"]
    parts += ["interleaved"] if rope.interleaved else []
    return " ".join(parts + [f"{key}={value}" for key, value in sorted(rope.scaling.items())])


def _layout(shapes: Sequence[KVShape]) -> str:
    """`"30 x 3x(64+64)"`: layers x heads x (key + value); `shared`: the value is in the key."""
    runs = []
    for shape, group in itertools.groupby(shapes):
        value = "shared" if shape.shared_value else str(shape.value_dim)
        runs.append(f"{len(list(group))} x {shape.heads}x({shape.key_dim}+{value})")
    return ", ".join(runs)
