"""The model's files and its tokenizer, for whoever needs no model: the API process."""

from __future__ import annotations

from baton.config.options import EngineOptions
from baton.core.progress import Progress
from baton.models.source import ModelSource, resolve_source
from baton.models.tokenizer import Tokenizer, load_tokenizer


def find_source(options: EngineOptions) -> ModelSource:
    """The model's files on this machine, fetched first if need be, with a progress bar."""
    model = options.model
    with Progress("bytes") as progress:
        return resolve_source(
            model.model,
            revision=model.revision,
            load_format=model.load_format,
            progress=progress,
        )


def tokenizer_of(options: EngineOptions, source: ModelSource) -> Tokenizer | None:
    """The tokenizer that the options ask for, for a model that has been found already."""
    model = options.model
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(source, model.tokenizer, revision=model.revision)
