"""Tokenizers rebuilt from GGUF metadata, kinds that the embedded model does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from baton.core.errors import ModelError
from baton.models import gguf_tokenizer
from baton.models.gguf_tokenizer import GGUFTokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def write(path: Path, model: str, tokens: list[str], kinds: list[int], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str, **more: Any) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "Ġ t", "h e", "Ġt he"]
    tokens = [*alphabet, *(m.replace(" ", "") for m in merges), "<s>", "</s>", "<|eot|>", "<tool>"]
    kinds = [NORMAL] * (len(tokens) - 4) + [CONTROL] * 3 + [USER]
    ids = {"bos_token_id": len(tokens) - 4, "eos_token_id": len(tokens) - 3}
    ids["eot_token_id"] = len(tokens) - 2
    return write(path, "gpt2", tokens, kinds, tokenizer_pre=pre, token_merges=merges, **ids, **more)


def pieces(tokenizer: GGUFTokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.backend.encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("smollm", ["Ġthe", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["Ġthe", "Ġ", "12", "3", "4"]),
        ("llama-bpe", ["<s>", "Ġthe", "Ġ", "12", "3", "4"]),
        ("qwen2", ["Ġthe", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_words_are_cut_as_the_file_says(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert pieces(GGUFTokenizer(byte_level(tmp_path / "m.gguf", pre)), " the 1234") == expected


def test_unknown_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'new'.*tokenizer"):
        GGUFTokenizer(byte_level(tmp_path / "m.gguf", "new"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is 'bert'"):
        GGUFTokenizer(write(tmp_path / "b.gguf", "bert", ["a"], [NORMAL]))


def test_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gpt2", ["a"], [NORMAL])
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.merges"):
        GGUFTokenizer(path)


def test_special_tokens_ends_and_templates(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]
    path = byte_level(
        tmp_path / "m.gguf",
        "gpt-2",
        chat_template=templates,
        add_bos_token=True,
        add_eos_token=True,
    )
    tokenizer = GGUFTokenizer(path)
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.templates == {"default": "D", "tool_use": "T"}
    to_id = tokenizer.backend.token_to_id
    assert tokenizer.eos_ids == [to_id("</s>"), to_id("<|eot|>")]
    assert pieces(tokenizer, "<tool><|eot|>") == ["<s>", "<tool>", "<|eot|>", "</s>"]
    added = tokenizer.backend.get_added_tokens_decoder()
    assert added[to_id("<|eot|>")].special
    assert not added[to_id("<tool>")].special


def test_sentencepiece_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    words = ["▁", "t", "h", "e", "▁t", "he", "▁the", "x"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words))]
    path = write(
        tmp_path / "m.gguf",
        "llama",
        tokens,
        kinds,
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    first = GGUFTokenizer(path)
    assert pieces(first, "the é") == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert first.backend.decode(first.backend.encode("the é").ids) == "the é"

    def refuse(*args: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_tokenizer, "TemplateProcessing", refuse)
    second = GGUFTokenizer(path)
    assert isinstance(second.backend, tokenizers.Tokenizer)
    assert second.backend.to_str() == first.backend.to_str()
    assert second.eos_ids == [2]
