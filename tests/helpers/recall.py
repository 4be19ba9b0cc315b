"""Greedy answers of a reference model, recorded on a CPU in float32, for other devices to equal.

`python tests/helpers/recall.py recall-rope` (tests and src on the path) records them anew, in
`tests/models/answers/`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from baton.core.sampling import SamplingParams
from baton.engine.llm import LLM
from baton.evals.document import Digest
from baton.evals.exam import Exam, Suite
from baton.evals.marks import Marks
from baton.evals.tasks import TASKS

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "models" / "answers"


def folder(name: str) -> Path:
    """Of a reference model."""
    return ROOT / "models" / name


@dataclass(frozen=True)
class Given:
    """A greedy continuation. margins: nats between the two likeliest tokens, at each token."""

    task: str
    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Record:
    """Answers of a model to a suite whose digest says that the questions are still the same."""

    suite: Suite
    digest: str
    answers: list[Given]


def exams(suite: Suite) -> list[Exam]:
    """Its contexts and questions."""
    return list(suite.exams(Marks(suite.alphabet, suite.seed)))


def digest(suite: Suite) -> str:
    """Of everything that it asks."""
    made = Digest()
    for exam in exams(suite):
        made.add(exam)
    return made.text()


def answer(llm: LLM, suite: Suite) -> list[Given]:
    """What it writes, whether right or wrong: as many tokens as the right answer has."""
    asked = [(exam, query, query.spans[0][0]) for exam in exams(suite) for query in exam.queries]
    prompts = [exam.tokens[: query.at] + query.tokens[:first] for exam, query, first in asked]
    params = [
        SamplingParams(
            max_tokens=len(query.tokens) - first, temperature=0.0, ignore_eos=True, logprobs=2
        )
        for _, query, first in asked
    ]
    given = []
    for (exam, _, _), output in zip(asked, llm.generate(prompts, params), strict=True):
        said = output.completions[0]
        tops = [[one.logprob for one in position.top] for position in said.logprobs or []]
        given.append(Given(exam.task, said.token_ids, [round(a - b, 3) for a, b in tops]))
    return given


def recorded(name: str) -> Record:
    """What the repository keeps of a model."""
    found = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return msgspec.convert(found, Record)


#: Every task but `multiquery`, where nobody knows what comes between two answers, and `compare`,
#: which the models guess. The last length takes a minute on a CPU: tests there leave it out.
TASKS_ASKED = tuple(task for task in TASKS if task not in ("multiquery", "compare"))
SUITE = Suite("marks", TASKS_ASKED, (256, 1024, 8192), contexts=1, queries=4)
OPTIONS: dict[str, Any] = {
    "max_model_len": 8192, "num_kv_pages": 1024, "block_size": 16, "threads": 1,
}  # fmt: skip


def main() -> None:
    """Record a model's answers."""
    (name,) = sys.argv[1:]
    with LLM(str(folder(name)), dtype="float32", **OPTIONS) as llm:
        answers = answer(llm, SUITE)
    RECORDS.mkdir(exist_ok=True)
    head = json.dumps({"suite": asdict(SUITE), "digest": digest(SUITE)})
    lines = ",\n".join(json.dumps(asdict(one)) for one in answers)
    text = head[:-1] + ', "answers": [\n' + lines + "\n]}\n"
    (RECORDS / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
