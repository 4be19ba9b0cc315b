"""Text to token ids and back. The `tokenizers` library does the work; transformers is imported only
for checkpoints that have no `tokenizer.json`, because that costs seconds.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from baton.core.errors import ModelError, RequestError
from baton.models.chat import ChatTemplate
from baton.models.detokenizer import Detokenizer, Pieces
from baton.models.folder import read_json
from baton.models.source import ModelSource, eos_ids, read_config, resolve_source
from baton.models.span import Span

_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe; nothing in it changes after loading.

    Attributes:
        vocab_size: ids are in `[0, vocab_size)`; the model's vocabulary may be larger (padding).
        eos_ids: ids that end a generation (tokenizer, config and generation config together).
        digest: SHA-256 (hex) of the tokenizer's files, special tokens and chat templates.
        chat_template: the default template's text, None if there is none.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos: list[int],
        special: dict[str, str],
        templates: dict[str, str],
        digest: str,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = Pieces(backend)
        self._chat = ChatTemplate(templates, special)
        self._hidden = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids = tuple(dict.fromkeys(eos))
        self.chat_template = templates.get("default")
        extra = json.dumps([special, templates], sort_keys=True)
        self.digest = hashlib.sha256(f"{digest}\n{extra}".encode()).hexdigest()

    def encode(self, text: str, special: bool = True, most_tokens: int | None = None) -> list[int]:
        """Token ids of a text; `special` adds what the model wants around it (such as BOS). Other
        threads can run meanwhile.

        Special tokens written in the text become their ids either way, as in transformers.

        Args:
            most_tokens: refuse, before the work, a text that is certain to have more.

        Raises:
            RequestError: the text is too long, or has a lone surrogate, which UTF-8 cannot express.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text is not valid Unicode: lone surrogate at character {error.start}",
                param="prompt",
            ) from None
        if most_tokens is not None and self._span is not None:
            least = self._span.least_tokens(raw)
            if least > most_tokens:
                raise RequestError(
                    f"the prompt has at least {least} tokens ({len(raw)} bytes), but at most "
                    f"{most_tokens} fit",
                    param="prompt",
                    code="context_length_exceeded",
                )
        # of one alone, the library's `encode` keeps Python's lock, for minutes if need be
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    @cached_property
    def _span(self) -> Span | None:
        return Span.of(self._backend)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 read as U+FFFD, unknown ids as nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str:
        """One token as text, its leading space kept; part of a character reads as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token as bytes, so that a client can join parts of a character."""
        return self._pieces.bytes(token_id)

    def chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
        **kw: Any,
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template (`kw` go to it: `tools`...).

        Args:
            most_tokens: as in `encode`.

        Raises:
            RequestError: no template, or it refuses the messages, or they are too long; `param` is
                "messages".
        """
        text = self._chat.render(messages, add_generation_prompt, **kw)
        try:
            return self.encode(text, special=False, most_tokens=most_tokens)
        except RequestError as error:
            raise RequestError(str(error), param="messages", code=error.code) from None

    def stream(self, skip_special: bool = True) -> Detokenizer:
        """A new stream of text from ids."""
        hidden = self._hidden if skip_special else frozenset()
        return Detokenizer(self._pieces.joiner(), hidden)


def load_tokenizer(
    source: ModelSource, tokenizer: str | None = None, *, revision: str | None = None
) -> Tokenizer:
    """The model's tokenizer, or the one that `tokenizer` names (folder, GGUF, hub id, embedded).

    Raises:
        ModelError: no tokenizer there, or a damaged one.
    """
    ends = eos_ids(read_config(source))
    if tokenizer is not None:
        folder = Path(tokenizer).expanduser()
        if folder.is_dir():
            source = ModelSource("folder", folder, tokenizer)
        else:
            source = resolve_source(tokenizer, revision=revision, load_format="dummy")
    return _from_gguf(source.path, ends) if source.is_gguf else _from_folder(source.path, ends)


def _from_gguf(path: Path, ends: list[int]) -> Tokenizer:
    from baton.models.gguf_tokenizer import GGUFTokenizer

    inside = GGUFTokenizer(path)
    return Tokenizer(
        inside.backend,
        eos=inside.eos_ids + ends,
        special=inside.special,
        templates=inside.templates,
        digest=inside.digest,
    )


def _from_folder(folder: Path, ends: list[int]) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    file = folder / "tokenizer.json"
    if file.exists():
        content = file.read_bytes()
        try:
            backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(
                file=file, problem=f"cannot be read: {error}", expected="a tokenizers file"
            ) from None
        special = _special_tokens(folder, config)
        _complete(backend, config, special)
        digest = hashlib.sha256(content).hexdigest()
    else:
        backend, special = _convert(folder)
        digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
    end = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        backend,
        eos=([] if end is None else [end]) + ends,
        special=special,
        templates=_templates(folder, config),
        digest=digest,
    )


def _convert(folder: Path) -> tuple[Backend, dict[str, str]]:
    """Vocabulary files of other kinds (SentencePiece, vocab and merges), by transformers."""
    from transformers import AutoTokenizer

    expected = (
        "tokenizer.json, or vocabulary files that transformers can convert; --tokenizer names "
        "another folder, --skip-tokenizer-init serves token ids only"
    )
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = loaded.backend_tokenizer
        # without files, transformers makes an empty one of the kind that config.json names
        if backend.get_vocab_size(with_added_tokens=False) <= len(loaded.all_special_tokens):
            raise ValueError("no vocabulary files")
        return backend, dict(loaded.special_tokens_map)
    except Exception as error:  # whatever the conversion trips over
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            file=folder, problem=f"has no usable tokenizer ({reason[0]})", expected=expected
        ) from error


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`... -> text; older checkpoints keep them in a file of their own."""
    path = folder / "special_tokens_map.json"
    values = (read_json(path) if path.exists() else {}) | config
    special = {}
    for name in _SPECIAL:
        value = values.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _complete(backend: Backend, config: dict[str, Any], special: dict[str, str]) -> None:
    """Add the tokens that only `tokenizer_config.json` has, as transformers does.

    Its `add_bos_token` and `add_eos_token` do not count: `tokenizer.json` has its own rule.
    """
    known = backend.get_added_tokens_decoder()
    listed = {int(key): value for key, value in config.get("added_tokens_decoder", {}).items()}
    for token_id, spec in sorted(listed.items()):
        token = AddedToken(**{k: v for k, v in spec.items() if k != "__type"})
        if repr(token) != repr(known.get(token_id)):
            backend.add_tokens([token])
    present = {added.content for added in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(special.values()) if text not in present]
    backend.add_tokens([AddedToken(text, special=True) for text in missing])


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: files win over `tokenizer_config.json`."""
    named = config.get("chat_template")
    found = {}
    if isinstance(named, str):
        found["default"] = named
    elif isinstance(named, list):
        found |= {entry["name"]: entry["template"] for entry in named}
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return found | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
