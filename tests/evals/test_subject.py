"""Who answers: an engine judged without writing, and a server that writes, agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from baton.cli.app import main
from baton.core.errors import BatonError, ConfigError, RequestError
from baton.core.sampling import SamplingParams
from baton.engine.llm import LLM
from baton.evals.compare import compare
from baton.evals.document import load
from baton.evals.exam import Exam, Query, Suite
from baton.evals.marks import Marks
from baton.evals.page import comparison_page
from baton.evals.run import Text, perplexity, run
from baton.evals.setup import form_of, no_perplexity, suite_of, texts_of
from baton.evals.subject import Engine, Server
from baton.evals.tasks import Borders
from baton.evals.words import Words

TINY = str(Path(__file__).parent / "tiny")
SUITE = Suite(
    "marks", ("single", "multikey2", "multiquery", "tracking"), (128,), 3, 12, 0, 16,
    Borders(16, 16, 32, 4),
)  # fmt: skip
FORM = Marks(16, 0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, dtype="float32", max_model_len=512, num_kv_pages=512, block_size=16) as engine:
        yield engine


class Handler(BaseHTTPRequestHandler):
    """`/v1` over an LLM; `text` makes it forget to return token ids."""

    llm: LLM
    text = False

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["prompt"] == [1]:
            self.reply({"choices": []})
            return
        if body["prompt"] == [0]:
            self.reply({"error": "no such prompt"}, 400)
            return
        params = SamplingParams(
            max_tokens=body["max_tokens"], temperature=body["temperature"],
            ignore_eos=body.get("ignore_eos", False), skip_special_tokens=False,
            prompt_logprobs=body.get("prompt_logprobs"),
        )  # fmt: skip
        output = self.llm.generate([body["prompt"]], params)[0]
        choice: dict[str, Any] = {"text": output.completions[0].text}
        if not self.text:
            choice["token_ids"] = output.completions[0].token_ids
        if output.prompt_logprobs:
            choice["prompt_logprobs"] = [
                one and {str(one.chosen.token_id): {"logprob": one.chosen.logprob}}
                for one in output.prompt_logprobs
            ]
        self.reply({"choices": [choice]})

    def reply(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(llm: LLM) -> Iterator[str]:
    Handler.llm, Handler.text = llm, False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_judging_is_what_writing_would_give(llm: LLM, url: str) -> None:
    """Every answer of the server is written token by token; the engine's are not."""
    facts: tuple[dict[str, Any], dict[str, Any]] = {"name": "tiny"}, {}
    text = Text("bytes", list(b"The lamp is lit. " * 20), 128)
    mine = run(Engine(llm), FORM, SUITE, [text], facts, lambda *_: None)
    theirs = run(Server(url), FORM, SUITE, [text], facts, lambda *_: None)
    assert mine.digest == theirs.digest
    hits = [one.hit for one in mine.answers]
    assert hits == [one.hit for one in theirs.answers]
    assert 0.2 < sum(hits) / len(hits) < 1, "both kinds of answers occur"
    assert mine.perplexity[0].loss == pytest.approx(theirs.perplexity[0].loss, abs=1e-4)
    assert theirs.computed is None
    assert mine.computed is not None
    assert mine.computed < 0.4 * mine.prompts, "a context is computed once"


def test_decode_says_what_prefill_judges(llm: LLM) -> None:
    facts: tuple[dict[str, Any], dict[str, Any]] = {"name": "tiny"}, {}
    judged, written = (
        run(Engine(llm, write), FORM, SUITE, [], facts, lambda *_: None) for write in (False, True)
    )
    found = compare(judged, written)
    assert (found.all.paired.lost, found.all.paired.won) == (0, 0)
    assert found.all.kl is not None
    assert found.all.kl.mean < 1e-5
    answers = list(zip(judged.answers, written.answers, strict=True))
    assert all(len(a.ids) == len(b.ids) for a, b in answers if b.hit)
    assert any(0 < len(b.ids) < len(a.ids) for a, b in answers if not b.hit), "up to a wrong token"


def test_losses_and_distributions_are_those_of_the_answer(llm: LLM) -> None:
    exam = SUITE.exam(FORM, "multiquery", 128, 0)
    query = exam.queries[0]
    found = Engine(llm).take(exam, lambda _: None)[0]
    rows = llm.score(exam.tokens + query.tokens)
    places = [query.at + i for span in query.spans for i in range(*span)]
    right = [query.tokens[i - query.at] for i in places]
    losses = [-float(rows[at - 1][token]) for at, token in zip(places, right, strict=True)]
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert len(found.ids) == len(places) == 12
    for ids, logs, at in zip(found.ids, found.logprobs, places, strict=True):
        assert ids[0] == int(rows[at - 1].argmax())
        assert logs == pytest.approx([float(rows[at - 1][i]) for i in ids], abs=1e-4)


def test_a_server_without_token_ids_needs_a_tokenizer(llm: LLM, url: str) -> None:
    Handler.text = True
    exam = SUITE.exam(FORM, "single", 128, 0)
    with pytest.raises(ConfigError, match="--tokenizer"):
        Server(url).take(exam, lambda _: None)
    compared = Server(url, tokenizer=llm.tokenizer).take(exam, lambda _: None)
    assert [one.hit for one in compared] == [
        one.hit for one in Engine(llm).take(exam, lambda _: None)
    ]


def test_what_a_server_refuses_is_told(url: str) -> None:
    exam = Exam("single", 8, 0, [0], [Query(1, [5], [(0, 1)], 1)])
    with pytest.raises(BatonError, match=r"answered 400: .*no such prompt"):
        Server(url).take(exam, lambda _: None)
    exam = Exam("single", 8, 0, [1], [Query(1, [5], [(0, 1)], 1)])
    with pytest.raises(BatonError, match="without 'choices'"):
        Server(url).take(exam, lambda _: None)
    with pytest.raises(BatonError, match=r"127\.0\.0\.1:1"):
        Server("http://127.0.0.1:1")


def test_lengths_beyond_the_engine_are_refused(llm: LLM) -> None:
    long = replace(SUITE, lengths=(128, 1024))
    with pytest.raises(ConfigError, match="longest of 512"):
        run(Engine(llm), FORM, long, [], ({}, {}), lambda *_: pytest.fail("asks first"))
    with pytest.raises(RequestError, match="max_model_len"):
        Engine(llm).loss([5] * 600)
    whole = perplexity(Engine(llm), Text("long", [5] * 1024, 512), lambda *_: None)
    assert (whole.length, whole.tokens) == (511, 2 * 510), "a prompt is one token shorter"
    with pytest.raises(ConfigError, match="too few for a window"):
        perplexity(Engine(llm), Text("short", [5], 128), lambda *_: None)


FLAGS: dict[str, Any] = {
    "tasks": "across,single", "lengths": "1K,512", "contexts": 1, "queries": 2, "alphabet": 16,
    "exam_seed": 3, "page": 16, "block": 32, "chunk": 64, "segments": 4,
}  # fmt: skip


def test_flags_become_a_suite(llm: LLM) -> None:
    suite = suite_of(FLAGS)
    assert suite.lengths == (512, 1024)
    assert suite.tasks[-1] == "single"
    assert len(suite.tasks) == 6
    form, told = form_of(suite, "auto", llm.tokenizer)
    assert isinstance(form, Marks)
    assert told.form == "marks"
    assert isinstance(form_of(suite, "words", llm.tokenizer)[0], Words)
    with pytest.raises(ConfigError, match="--lengths 4X"):
        suite_of(FLAGS | {"lengths": "4X"})
    with pytest.raises(ConfigError, match="--tokenizer"):
        form_of(suite, "words", None)


def test_texts_are_cut_to_what_is_wanted(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("The lamp is lit. " * 400)
    suite = suite_of(FLAGS)
    (text,) = texts_of(suite, [str(file)], 2000, llm.tokenizer)
    assert (len(text.tokens), text.length) == (2000, 1024)
    assert text.name.startswith("a.txt ")
    assert texts_of(suite, [str(file)], 0, llm.tokenizer) == []
    with pytest.raises(ConfigError, match=r"none\.txt"):
        texts_of(suite, [str(tmp_path / "none.txt")], 10, llm.tokenizer)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ConfigError, match=r"empty\.txt: the file is empty"):
        texts_of(suite, [str(empty)], 10, llm.tokenizer)


def test_an_mtp_module_changes_no_answer_and_its_guesses_are_counted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (exam,) = [one for one in SUITE.exams(FORM) if one.task == "multiquery"][:1]
    plain = Engine(llm).take(exam, lambda _: None)
    assert all(one.accepted is None for one in plain)
    assert Engine(llm).accepted(exam.tokens) is None
    with LLM(
        TINY, dtype="float32", max_model_len=512, num_kv_pages=512, block_size=16, mtp=True
    ) as drafting:
        found = Engine(drafting).take(exam, lambda _: None)
        assert [(one.hit, one.ids) for one in found] == [(one.hit, one.ids) for one in plain]
        assert [one.loss for one in found] == pytest.approx([one.loss for one in plain], abs=1e-5)
        for query, answer in zip(exam.queries, found, strict=True):
            # without the cache, in one piece
            whole = exam.tokens[: query.at] + query.tokens
            place = [query.at + i for first, last in query.spans for i in range(first, last)]
            scores = drafting.examine([(whole, 0)])[0]
            best = scores.logprobs.argmax(-1)
            assert answer.accepted == sum(int(scores.drafts[i - 2] == best[i - 1]) for i in place)
        tokens = exam.tokens[:128]
        scores = drafting.examine([(tokens, 0)])[0]
        share = (scores.drafts[:-1] == scores.logprobs[1:].argmax(-1)).float().mean().item()
        for piece in (128, 17):
            monkeypatch.setattr("baton.evals.subject.PIECE", piece)
            assert Engine(drafting).accepted(tokens) == pytest.approx(share)


def test_a_missing_perplexity_is_said_everywhere(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--form", "marks", "--alphabet", "16", "--tasks", "single", "--lengths", "128"]
    asked += ["--contexts", "1", "--page", "16", "--block", "16", "--chunk", "32"]
    asked += ["--segments", "4"]
    result, html = tmp_path / "a.json", tmp_path / "a.html"
    with pytest.raises(SystemExit) as ended:
        main(["eval", "run", url, *asked, "--out", str(result), "--html", str(html)])
    assert not ended.value.code
    why = "no tokenizer for the text: give --tokenizer"
    assert f"No perplexity: {why}." in capsys.readouterr().out
    assert f"No perplexity: {why}." in html.read_text()
    found = load(result)
    assert (found.perplexity, found.no_perplexity) == ([], why)
    made = compare(found, found)
    assert made.as_dict()["no_perplexity"] == made.no_perplexity == f"A: {why}; B: {why}"
    assert escape(made.no_perplexity) in comparison_page(made)
    assert no_perplexity(0, None) == "not asked for (--text-tokens 0)"


def test_texts_that_differ_are_said(llm: LLM) -> None:
    facts: tuple[dict[str, Any], dict[str, Any]] = {"name": "tiny"}, {}
    suite = replace(SUITE, tasks=("single",), lengths=(128,), contexts=1)
    texts = [Text("bytes", list(b"The lamp is lit. " * 20), size) for size in (128, 64)]
    a, b = (run(Engine(llm), FORM, suite, [text], facts, lambda *_: None) for text in texts)
    assert compare(a, a).no_perplexity == ""
    assert "same text in the same windows" in compare(a, b).no_perplexity
