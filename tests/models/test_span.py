"""What one token can stand for at most, and texts that are refused for it before the work."""

from __future__ import annotations

import random
import threading
import time
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from baton.core.errors import RequestError
from baton.models.source import ModelSource, resolve_source
from baton.models.span import Span
from baton.models.tokenizer import load_tokenizer

ROPE = str(Path(__file__).parents[2] / "models" / "recall-rope")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # it comes in any order


def byte_level(alphabet: list[str] = ALPHABET) -> Tokenizer:
    words = [*alphabet, "aa", "aaaa", "ĠĠ"]
    merges = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ")]
    made = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback(missing: int = -1, fallback: bool = True) -> Tokenizer:
    words = [f"<0x{byte:02X}>" for byte in range(256) if byte != missing]
    words += ["a", "▁", "▁▁", "aa"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("▁", "▁"), ("a", "a")]
    made = Tokenizer(BPE(vocabulary, merges, byte_fallback=fallback))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def texts(count: int = 400) -> list[str]:
    rng = random.Random(5)
    letters = "aaaaacc   \n\u212a\u1112\u1161\u11abé漢🙂"
    made = ["".join(rng.choices(letters, k=rng.randrange(1, 60))) for _ in range(count)]
    return [*made, "a" * 4000, " " * 4000, "\u212a" * 500, "\u1112\u1161\u11ab" * 500]


def test_no_text_has_fewer_tokens() -> None:
    nfc = byte_level()
    nfc.normalizer = normalizers.NFC()
    lacking = [char for char in ALPHABET if char != "c"]
    for backend, span in (
        (byte_level(), Span(4)),
        (nfc, Span(36)),
        (byte_level(lacking), Span(4, b"c")),
        (byte_fallback(), Span(6)),
    ):
        assert Span.of(backend) == span
        for text in texts():
            raw = text.encode()
            assert len(backend.encode(text).ids) >= span.least_tokens(raw), text[:20]
            if not span.unknown:
                assert span.least_tokens(raw) >= len(raw) / span.most
    assert byte_level(lacking).encode("c" * 1000).ids == []  # which is why it must not count
    assert Span(4, b"c").least_tokens(b"c" * 1000 + b"aaaaa") == 2


def test_tokenizers_of_models(smollm: ModelSource) -> None:
    for source in (smollm, resolve_source(ROPE)):
        tokenizer = load_tokenizer(source)
        span = Span.of(tokenizer._backend)
        assert span is not None
        assert 5 < span.most < 200
        for text in texts():
            assert len(tokenizer.encode(text)) >= span.least_tokens(text.encode())


def test_characters_get_shorter_by_no_more_than_is_said() -> None:
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            whole = len(chr(code).encode())
            parts = len(unicodedata.normalize("NFD", chr(code)).encode())
            assert whole <= 3 * parts
            assert parts <= 3 * whole


def test_where_text_may_vanish_nothing_is_said() -> None:
    wrong = [Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")), byte_level(ALPHABET[:-1])]
    wrong[-1].normalizer = normalizers.NFC()
    wrong += [byte_fallback(missing=77), byte_fallback(fallback=False)]
    for normalizer in (
        normalizers.Strip(),
        normalizers.NFKC(),
        normalizers.Replace(Regex(" +"), " "),
        normalizers.Replace("aa", "a"),
        normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]),
    ):
        wrong.append(byte_level())
        wrong[-1].normalizer = normalizer
    for stage in (pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(" ", "removed")):
        wrong.append(byte_level())
        wrong[-1].pre_tokenizer = pre_tokenizers.Sequence([stage, pre_tokenizers.ByteLevel()])
    wrong.append(byte_level())
    wrong[-1].add_special_tokens([AddedToken("<x>", rstrip=True)])
    for backend in wrong:
        assert Span.of(backend) is None


def test_long_texts_are_refused_before_the_work(
    smollm: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(smollm)
    text = "word " * 2000
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, most_tokens=len(ids)) == ids, "only what is certain is refused"

    class Working:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise AssertionError("it set to work")

    monkeypatch.setattr(tokenizer, "_backend", Working())
    with pytest.raises(
        RequestError, match=r"at least \d+ tokens \(10000 bytes\), .* 100 fit"
    ) as no:
        tokenizer.encode(text, most_tokens=100)
    assert (no.value.param, no.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match="at most 100 fit") as no:
        tokenizer.chat([{"role": "user", "content": text}], most_tokens=100)
    assert (no.value.param, no.value.code) == ("messages", "context_length_exceeded")


def test_other_threads_run_while_a_long_text_is_encoded(smollm: ModelSource) -> None:
    tokenizer, done = load_tokenizer(smollm), threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    text = " ".join(str(i) for i in range(80_000))  # takes a good part of a second
    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.05)
    before = turns
    tokenizer.encode(text)
    after = turns
    done.set()
    thread.join()
    assert after - before > 10, "it had the lock to itself"
