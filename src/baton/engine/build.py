"""From what the user said to a runner that can run: source, config, weights, pages, fingerprint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton import __version__
from baton.config.engine import EngineConfig
from baton.config.fingerprint import Fingerprint
from baton.config.machine import measure_machine
from baton.config.options import EngineOptions
from baton.config.resolve import resolve
from baton.core.forward import TensorGroup
from baton.core.log import get_logger
from baton.core.progress import Progress
from baton.core.units import format_bytes, format_seconds
from baton.engine.executor import Executor, Ranks
from baton.kv.format import bytes_per_page, make_views
from baton.models import registry
from baton.models.load import dummy_weights, load_weights
from baton.models.source import ModelSource, open_checkpoint, read_config, resolve_source
from baton.parallel.group import make_group
from baton.runner.runner import Runner

log = get_logger("engine")


@dataclass
class Prepared:
    """Decided on the host, nothing on the device yet."""

    options: EngineOptions
    config: EngineConfig
    source: ModelSource


@dataclass
class Built:
    """One rank, ready to run."""

    runner: Runner
    fingerprint: Fingerprint
    close: Callable[[], None]


def prepare(options: EngineOptions) -> Prepared:
    """Find the model, read its config and decide everything; nothing is loaded yet.

    Raises:
        ConfigError, ModelError: naming the flag or the file at fault.
    """
    model = options.model
    source = resolve_source(
        model.model, revision=model.revision, load_format=model.load_format, progress=Progress
    )
    model_config = registry.parse(read_config(source), source.path)
    group_size = options.parallel.tensor_parallel_size

    def page_bytes(page_size: int, kv_dtype: str) -> int:
        return bytes_per_page(registry.kv_shapes(model_config, group_size), page_size, kv_dtype)

    config = resolve(
        options,
        model_config,
        measure_machine(options.device.device),
        model_path=str(source.path),
        tokenizer_path=model.tokenizer or str(source.path),
        load_format=source.load_format,
        kv_bytes_per_page=page_bytes,
        weight_bytes=registry.weight_bytes(model_config),
    )
    return Prepared(options, config, source)
