"""Fetching model folders from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import ModelError

_TEXT = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_WEIGHTS = ["*.safetensors"]
#: folders beside the model proper, in other formats or precisions
_IGNORE = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]


def fetch(model: str, revision: str | None, *, weights: bool) -> Path:
    """Folder of a hub snapshot in the hub's own cache; only what is missing is downloaded.

    The hub library draws its progress bars itself, and honours its environment (endpoint, token,
    offline mode).

    Raises:
        ModelError: no such model or revision, no access to it, or no network and no copy here.
    """
    # the import costs half a second and local models do not need it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fail(problem: str, expected: str) -> ModelError:
        return ModelError(file=model, problem=problem, expected=expected)

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_TEXT + (_WEIGHTS if weights else []),
                ignore_patterns=_IGNORE,
            )
        )
    except GatedRepoError:
        raise fail("access to this model is restricted", "`hf auth login` with access") from None
    except RepositoryNotFoundError:
        raise fail(
            "is not a folder here, and the hub has no such model (or it is private)",
            "an existing path, or a hub id you may read (`hf auth login`)",
        ) from None
    except RevisionNotFoundError:
        raise fail(
            f"the hub has no revision {revision!r} of it", "a branch, tag or commit"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()
        raise fail(
            "is not a folder here, and the hub cannot be reached "
            f"({first[0] if first else type(error).__name__})",
            "a network, a copy in the hub's cache, or the path of a folder or GGUF file; "
            "the embedded models (`baton models list`) do not need the hub",
        ) from None
