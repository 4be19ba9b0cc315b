"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library from its metadata.

Byte-level BPE ("gpt2") is built here in a fraction of a second. SentencePiece ("llama") goes
through transformers' converter, which takes seconds, once: the result is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from baton.core import env
from baton.core.errors import ModelError
from baton.models.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


_LLAMA_NAMES = ("llama-bpe", "llama3", "llama-v3")


class GGUFTokenizer:
    """What a GGUF file says about its tokenizer.

    `backend` encodes and decodes; `special` maps `bos_token`... to text for chat templates;
    `templates` are the chat templates by name; `eos_ids` end a generation.

    Raises:
        ModelError: damaged file, no tokenizer in it, or one of an unknown kind.
    """

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self.path = path
        self._fields = {
            key.removeprefix("tokenizer."): value
            for key, value in file.fields.items()
            if key.startswith("tokenizer.")
        }
        self._tokens: list[str] = self._need("ggml.tokens")
        text = json.dumps(self._fields, sort_keys=True, default=str)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.special = {
            name: self._tokens[token]
            for key, name in _NAMES.items()
            if (token := self._id(key)) is not None
        }
        ends = (self._id(key) for key in ("eos", "eot", "eom"))
        self.eos_ids = [token for token in ends if token is not None]
        default = {"default": self._fields.get("chat_template")}
        named = {
            name: self._fields.get(f"chat_template.{name}")
            for name in self._fields.get("chat_templates", [])
        }
        self.templates = {name: text for name, text in (default | named).items() if text}
        self.backend = self._build()

    def _need(self, key: str) -> Any:
        value = self._fields.get(key)
        if not value:
            raise ModelError(
                file=self.path,
                problem=f"has no tokenizer.{key}",
                expected="a tokenizer in the file, or the folder of one in `tokenizer`",
            )
        return value

    def _id(self, key: str) -> int | None:
        value = self._fields.get(f"ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self._tokens) else None

    def _build(self) -> Tokenizer:
        kind = self._need("ggml.model")
        if kind == "gpt2":
            backend = self._byte_level()
        elif kind == "llama":
            backend = self._sentencepiece()
        else:
            raise ModelError(
                file=self.path,
                problem=f"tokenizer.ggml.model is {kind!r}",
                expected="gpt2 or llama, or the folder of a tokenizer in `tokenizer`",
            )
        return backend

    def _byte_level(self) -> Tokenizer:
        pre = self._fields.get("ggml.pre", "gpt-2")
        vocab = {token: index for index, token in enumerate(self._tokens)}
        merges = [tuple(merge.split(" ", 1)) for merge in self._need("ggml.merges")]
        model = models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=self.special.get("unk_token"),
            fuse_unk=True,
            ignore_merges=pre in _LLAMA_NAMES,
        )
        backend = Tokenizer(model)
        backend.pre_tokenizer = self._splitter(pre)
        backend.decoder = decoders.ByteLevel()
        kinds = self._fields.get("ggml.token_type", [])
        for token, kind in zip(self._tokens, kinds, strict=False):
            if kind in {_CONTROL, _USER_DEFINED}:
                added = AddedToken(token, normalized=False, special=kind == _CONTROL)
                backend.add_tokens([added])
        self._add_ends(backend, bos_default=pre in _LLAMA_NAMES)
        return backend

    def _splitter(self, pre: str) -> pre_tokenizers.PreTokenizer:
        """How text is cut into words before merging, by the name llama.cpp gives it."""
        if pre == "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        if pre in {"gpt-2", "gpt2"}:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        pattern = _LLAMA3 if pre in _LLAMA_NAMES else _QWEN2 if pre == "qwen2" else None
        if pattern is None:
            raise ModelError(
                file=self.path,
                problem=f"tokenizer.ggml.pre is {pre!r}",
                expected="smollm, gpt-2, llama-bpe or qwen2; for others give the folder of the "
                "model's own tokenizer in `tokenizer`",
            )
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def _add_ends(self, backend: Tokenizer, bos_default: bool) -> None:
        """Have the tokens that the file asks for put around every text that is encoded."""
        wants_bos = self._fields.get("ggml.add_bos_token", bos_default)
        bos = self.special.get("bos_token") if wants_bos else None
        wants_eos = self._fields.get("ggml.add_eos_token", False)
        eos = self.special.get("eos_token") if wants_eos else None
        ends = dict.fromkeys(token for token in (bos, eos) if token)
        backend.post_processor = TemplateProcessing(
            single=[part for part in (bos, "$A", eos) if part],
            special_tokens=[(token, backend.token_to_id(token)) for token in ends],
        )

    def _sentencepiece(self) -> Tokenizer:
        kept = env.CACHE.get() / "tokenizers" / f"{self.digest}.json"
        if kept.exists():
            return Tokenizer.from_file(str(kept))
        # seconds of import, so only where it is needed
        from transformers import AutoTokenizer

        try:
            converted = AutoTokenizer.from_pretrained(
                str(self.path.parent), gguf_file=self.path.name, local_files_only=True
            )
        except Exception as error:  # the converter raises whatever the metadata trips over
            raise ModelError(
                file=self.path,
                problem=f"its tokenizer cannot be converted ({error})",
                expected="SentencePiece BPE, or the folder of a tokenizer in `tokenizer`",
            ) from error
        backend: Tokenizer = converted.backend_tokenizer
        self._add_ends(backend, bos_default=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        backend.save(str(part))
        part.replace(kept)
        return Tokenizer.from_file(str(kept))
