"""Tokenizers: ids and text as transformers has them; streams never show half a character."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from baton.core.errors import ModelError, RequestError
from baton.models.source import ModelSource
from baton.models.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\r\nnew\n\n\nlines\n",
    "It's we'll I'D 'tis don't",
    "1 22 333 4444 3.14159 1,000,000 ²③ ٣٤",
    "naïve café Ünïcödé ﬁ ﬂ Ω≈ç√",
    "中文字符和日本語の文字、한국어 텍스트。",
    "emoji 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️ 🤷🏻‍♀️ done",
    "\x00\x01\x1b[0m\x7f\u200b\u200d\ufeff\u202e",
    "combining e\u0301 \u0915\u094d\u0937",
    "\ufffd replacement \U0010ffff",
    "▁under▁ <0x41> Ġ Ċ",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x<|im_end|",
    "<s>a</s> <unk> [INST] <|tool|> x<|tool|>y",
    "def f(x):\n    return x  # comment\n\t\tpass",
    "a" * 300 + "!?" * 50,
    "Hello , world . It 's n't",
]


def random_texts(count: int = 300) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (32, 127), (0, 32), (0xA0, 0x600), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)]
    words = [*TEXTS[-5].split(), "<|im_end|>", "<s>", "</s>", "  ", "\n"]

    def part() -> str:
        if rng.random() < 0.3:
            return rng.choice(words)
        low, high = rng.choice(ranges)
        return "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(8)))

    return ["".join(part() for _ in range(rng.randrange(12))) for _ in range(count)]


CORPUS = TEXTS * 3 + ["the quick brown fox jumps over the lazy dog", "token tokens tokenizer"] * 20


def byte_level(folder: Path, **config: Any) -> Path:
    """A Llama-3-like folder: byte-level BPE, added tokens, a template that puts BOS first."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<|tool|>", normalized=False)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    return save(folder, backend, {"bos_token": "<s>", "eos_token": "</s>"} | config)


def sentencepiece(folder: Path, **config: Any) -> Path:
    """A Llama-2-like folder: spaces as U+2581, byte fallback, one leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    pieces = "▁abcdefghijklmnopqrstuvwxyzHTI'.,!中文é"
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("o", "k"), ("e", "n"), ("▁", "▁")]
    for piece in [*pieces, *(a + b for a, b in merges)]:
        vocab.setdefault(piece, len(vocab))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    return save(folder, backend, config)


def wordpiece(folder: Path, **config: Any) -> Path:
    """A decoder that neither fast path knows."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return save(folder, backend, {"eos_token": "</s>"} | config)


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("folder", folder, str(folder)))


def reference(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)


def check_equal(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS + random_texts():
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], repr(text)
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip) == expected
    assert ours.vocab_size == len(theirs)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool, rng: random.Random) -> str:
    stream, parts, rest = tokenizer.stream(skip), [], ids
    while rest:
        size = rng.choice([1, 1, 1, 2, 5])
        parts.append(stream.push(rest[:size]))
        rest = rest[size:]
    return "".join([*parts, stream.flush()])


def check_streams(tokenizer: Tokenizer, random_ids: bool) -> None:
    rng = random.Random(1)
    cases = [tokenizer.encode(text) for text in TEXTS + random_texts(100)]
    if random_ids:
        size = tokenizer.vocab_size + 5  # ids outside the vocabulary decode to nothing
        cases += [[rng.randrange(size) for _ in range(rng.randrange(60))] for _ in range(300)]
    for ids in cases:
        for skip in (True, False):
            assert streamed(tokenizer, ids, skip, rng) == tokenizer.decode(ids, skip), ids


def test_gguf_equals_transformers(smollm: ModelSource) -> None:
    ours = load_tokenizer(smollm)
    theirs = reference(smollm.path.parent, gguf_file=smollm.path.name)
    # its converter leaves out SmolLM2's rule that every digit is a word; only digits outside
    # ASCII have merges that show it
    plain = [text for text in TEXTS + random_texts() if text.isascii()]
    assert [ours.encode(text) for text in plain] == theirs(plain)["input_ids"]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    check_equal(ours, theirs)
    check_streams(ours, random_ids=True)
    assert ours.eos_ids == (2,)
    assert ours.chat_template == theirs.chat_template
    for messages in (
        [{"role": "user", "content": "Hi 👍"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "<|im_end|>"},
        ],
    ):
        for prompt in (True, False):
            assert (
                ours.chat(messages, prompt)
                == theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
            )


@pytest.mark.parametrize(
    "make, config",
    [
        (byte_level, {}),
        (byte_level, {"add_bos_token": False}),
        (byte_level, {"add_bos_token": True, "add_eos_token": True}),
        (
            byte_level,
            {
                "pad_token": "<|pad|>",
                "added_tokens_decoder": {
                    "601": {"content": "<|end|>", "special": True, "normalized": False}
                },
            },
        ),
        (sentencepiece, {}),
        (wordpiece, {}),
    ],
)
def test_folder_equals_transformers(tmp_path: Path, make: Any, config: dict[str, Any]) -> None:
    folder = make(tmp_path / "m", **config)
    ours = load(folder)
    check_equal(ours, reference(folder))
    check_streams(ours, random_ids=make is not wordpiece)
    assert 2 in ours.eos_ids


def test_vocabulary_files_without_tokenizer_json_go_through_transformers(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m", tokenizer_class="GPT2Tokenizer")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    ours = load(folder)
    assert ours.encode("the fox", special=False)
    assert ours.decode(ours.encode("the fox", special=False)) == "the fox"


def test_no_and_damaged_tokenizer(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load(folder)


def test_only_a_config_is_no_tokenizer(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no vocabulary files.*--skip-tokenizer-init"):
        load(tmp_path)


def test_tokenizer_of_another_folder(tmp_path: Path) -> None:
    model, other = byte_level(tmp_path / "m"), sentencepiece(tmp_path / "other")
    expected = load(other)
    (other / "config.json").unlink()
    source = ModelSource("folder", model, "m")
    ours = load_tokenizer(source, str(other))
    assert ours.digest == expected.digest != load(model).digest
    assert ours.encode("x the") == expected.encode("x the")


def test_stream_holds_half_a_character_and_keeps_spaces(smollm: ModelSource) -> None:
    tokenizer = load_tokenizer(smollm)
    stream = tokenizer.stream()
    seen = [stream.push([one]) for one in tokenizer.encode("a 🤷 b  c")]
    assert "".join(seen) == "a 🤷 b  c"
    assert not any("\ufffd" in part for part in seen)
    assert "" in seen  # the first byte of the emoji alone is no text
    cut = tokenizer.encode("🤷")[:-1]
    stream = tokenizer.stream()
    assert stream.push(cut) == ""
    assert stream.flush() == tokenizer.decode(cut)


def test_tokens_as_text_and_bytes(smollm: ModelSource, tmp_path: Path) -> None:
    for tokenizer in (load_tokenizer(smollm), load(sentencepiece(tmp_path / "m"))):
        ids = tokenizer.encode("the 中 🤷", special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == "the 中 🤷"
        assert tokenizer.token(tokenizer.encode("b the", special=False)[-1]) == " the"
    assert load(wordpiece(tmp_path / "w")).token(0) == "[UNK]"


def test_lone_surrogates_are_refused(smollm: ModelSource) -> None:
    tokenizer = load_tokenizer(smollm)
    with pytest.raises(RequestError, match="surrogate at character 1") as caught:
        tokenizer.encode("a\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        tokenizer.chat([{"role": "user", "content": "\ude00"}])
    assert caught.value.param == "messages"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{% generation %}{{ m.content | trim }}{% endgeneration %}\n"
    "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}{{ flavour }}{{ strftime_now('%Y')[:0] }}"
)


@pytest.mark.parametrize("where", ["config", "list", "file"])
def test_chat_template_equals_transformers(tmp_path: Path, where: str) -> None:
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "T"}]
    config = {"config": {"chat_template": TEMPLATE}, "list": {"chat_template": named}, "file": {}}
    folder = byte_level(tmp_path / "m", **config[where])
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    ours, theirs = load(folder), reference(folder)
    messages = [{"role": "user", "content": f" <b>é</b> {i} "} for i in range(8)]
    for options in (
        {},
        {"tools": [{"type": "function", "name": "ü<"}]},
        {"flavour": "x", "add_generation_prompt": False},
    ):
        given = {"add_generation_prompt": True} | options
        assert (
            ours.chat(messages, **given)
            == theirs.apply_chat_template(messages, **given)["input_ids"]
        )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        ["hi"],
        [{"content": "no role"}],
        [{"role": 3, "content": "x"}],
        [{"role": "wizard", "content": "x"}],
    ],
)
def test_bad_messages(tmp_path: Path, messages: Any) -> None:
    tokenizer = load(byte_level(tmp_path / "m", chat_template=TEMPLATE))
    with pytest.raises(RequestError) as caught:
        tokenizer.chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template, problem",
    [
        (None, "no chat template"),
        ("{% for %}", "does not compile"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
        ("{{ messages.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
    ],
)
def test_templates_that_fail(tmp_path: Path, template: str | None, problem: str) -> None:
    config = {"chat_template": template} if template else {}
    tokenizer = load(byte_level(tmp_path / "m", **config))
    with pytest.raises(RequestError, match=problem) as caught:
        tokenizer.chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_many_threads(smollm: ModelSource) -> None:
    tokenizer = load_tokenizer(smollm)
    texts = random_texts(200)
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        chats = [[{"role": "user", "content": text}] for text in texts]
        assert list(pool.map(tokenizer.chat, chats)) == [tokenizer.chat(chat) for chat in chats]
        decoded = list(pool.map(tokenizer.decode, expected))
    assert decoded == [tokenizer.decode(ids) for ids in expected]
