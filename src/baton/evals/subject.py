"""Who is examined: an engine in this process, or a server behind a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx
import torch

from baton.core.errors import BatonError, ConfigError, RequestError
from baton.core.sampling import SamplingParams
from baton.core.step import Scores
from baton.engine.llm import LLM
from baton.evals.document import TOP, Answer
from baton.evals.exam import Exam, Query
from baton.evals.words import Encoder

STREAMS = 16  #: requests that a server has at once
HELD = 1 << 24  #: tokens of prompts in memory at once, at some 24 bytes each
PIECE = 256  #: positions of a text that are examined at once
Progress = Callable[[int], None]
"""Called with how many queries more are answered."""


class Subject(Protocol):
    """Answers exams of up to `longest` tokens; None: nobody knows."""

    longest: int | None

    def take(self, exam: Exam, progress: Progress) -> list[Answer]:
        """An answer to each of its queries, in order."""

    def loss(self, tokens: list[int]) -> float:
        """Mean loss, in nats, of all tokens but the first."""

    def accepted(self, tokens: list[int]) -> float | None:
        """Of the likeliest tokens from the third position on, after the right ones, the share that
        the MTP module had guessed one token earlier; None without one."""


def answer_to(exam: Exam, query: Query, hit: bool) -> Answer:
    """What is known of an answer without looking at it."""
    return Answer(
        task=exam.task,
        length=exam.length,
        context=exam.number,
        distance=query.distance,
        depth=round(1 - query.distance / query.at, 6),
        note=query.note,
        hit=hit,
    )


class Engine:
    """An `LLM`. Queries of a context share it through the prefix cache, many in a step.

    Answers are judged without being written: a greedy answer is right to the last token if and only
    if each of its tokens is the likeliest one after the right ones before it, and that takes one
    short prefill. Distributions come with it.

    Args:
        write: write the answers all the same, step by step, so that decode is examined instead.
            Distributions are then known up to the first wrong token.
    """

    def __init__(self, llm: LLM, write: bool = False) -> None:
        self.llm, self.write = llm, write
        self.longest: int | None = llm.config.max_model_len
        self._mtp = llm.config.model.mtp

    def take(self, exam: Exam, progress: Progress) -> list[Answer]:
        """See Subject."""
        found: list[Answer] = []
        self._fill(exam)
        for batch in self._batches(exam.queries):
            found += self._written(exam, batch) if self.write else self._scored(exam, batch)
            progress(len(batch))
        return found

    def loss(self, tokens: list[int]) -> float:
        """See Subject."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        known = self.llm.generate([tokens], params)[0].prompt_logprobs or []
        losses = [-position.chosen.logprob for position in known if position is not None]
        return sum(losses) / len(losses)

    def accepted(self, tokens: list[int]) -> float | None:
        """See Subject."""
        if not self._mtp or len(tokens) < 3:
            return None
        hits = 0
        for start in range(0, len(tokens) - 2, PIECE):  # a piece's rows are PIECE x vocabulary
            end = min(start + PIECE + 2, len(tokens))
            (found,) = self.llm.examine([(tokens[:end], start)])
            hits += int((found.drafts[:-1] == found.logprobs[1:].argmax(-1)).sum())
        return hits / (len(tokens) - 2)

    def _fill(self, exam: Exam) -> None:
        """Put the context into the cache. A question that came with it could be in one chunk with
        it, and would not read what the cache holds."""
        longest = max(query.at for query in exam.queries)
        self.llm.generate([exam.tokens[:longest]], SamplingParams(max_tokens=1, temperature=0.0))

    def _batches(self, queries: Sequence[Query]) -> Iterator[Sequence[Query]]:
        """As many as run at once, if the host can hold their prompts."""
        size = min(self.llm.config.max_num_seqs, max(1, HELD // queries[0].at))
        for first in range(0, len(queries), size):
            yield queries[first : first + size]

    def _written(self, exam: Exam, queries: Sequence[Query]) -> list[Answer]:
        """Each part of an answer after the right ones before it."""
        parts = [(query, *span) for query in queries for span in query.spans]
        params = [
            SamplingParams(max_tokens=last - first, temperature=0.0, ignore_eos=True, logprobs=TOP)
            for _, first, last in parts
        ]
        prompts = [exam.tokens[: query.at] + query.tokens[:first] for query, first, _ in parts]
        outputs = iter(self.llm.generate(prompts, params))
        made = []
        for query in queries:
            answer = answer_to(exam, query, True)
            for (first, last), output in zip(query.spans, outputs, strict=False):
                said = output.completions[0]
                for token, position in zip(
                    query.tokens[first:last], said.logprobs or [], strict=True
                ):
                    if not answer.hit:
                        break
                    answer.ids.append([one.token_id for one in position.top])
                    answer.logprobs.append([round(one.logprob, 6) for one in position.top])
                    answer.hit = position.chosen.token_id == token
            made.append(answer)
        return made

    def _scored(self, exam: Exam, queries: Sequence[Query]) -> list[Answer]:
        asked = []
        for query in queries:
            prompt = exam.tokens[: query.at]
            prompt += query.tokens  # in place: contexts are long
            # an MTP module's guess at the first answer token is made one token earlier
            asked.append((prompt, query.at + query.spans[0][0] - 1 - int(self._mtp)))
        found = self.llm.examine(asked)
        return [self._judge(exam, *pair) for pair in zip(queries, found, strict=True)]

    def _judge(self, exam: Exam, query: Query, scores: Scores) -> Answer:
        """`scores`: from the position before the first answer token on, or with an MTP module from
        the one before that."""
        first = query.spans[0][0]
        place = [i for start, stop in query.spans for i in range(start, stop)]
        index = torch.tensor(place) - first
        rows = scores.logprobs[index + int(self._mtp)]
        right = torch.tensor([query.tokens[i] for i in place])
        made = answer_to(exam, query, bool((rows.argmax(-1) == right).all()))
        made.loss = -float(rows.gather(1, right[:, None]).mean())
        best, ids = rows.topk(min(TOP, rows.shape[1]), dim=-1)
        made.ids = ids.tolist()
        made.logprobs = [[round(x, 6) for x in row] for row in best.tolist()]
        if self._mtp:
            made.accepted = int((scores.drafts[index] == ids[:, 0]).sum())
        return made


class Server:
    """An OpenAI-compatible server. It writes its answers, greedily; each part of an answer after
    the right ones before it. Distributions are not asked for.

    Args:
        url: of the server, with or without `/v1`.
        model: as the server calls it; asked for unless given.
        tokenizer: to compare texts, where the server returns no token ids.
    """

    def __init__(
        self, url: str, model: str | None = None, tokenizer: Encoder | None = None
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._client = httpx.Client(timeout=httpx.Timeout(3600.0, connect=10.0))
        self._tokenizer = tokenizer
        known = {one["id"]: one for one in self._call("GET", "/models", "data")}
        self.model: str = model or next(iter(known))
        self.longest: int | None = known.get(self.model, {}).get("max_model_len")

    def take(self, exam: Exam, progress: Progress) -> list[Answer]:
        """See Subject."""

        def answer(query: Query) -> Answer:
            hit = all(self._says(exam, query, *span) for span in query.spans)
            progress(1)
            return answer_to(exam, query, hit)

        found = [answer(exam.queries[0])]  # alone: it puts the context into the server's cache
        with ThreadPoolExecutor(STREAMS) as pool:
            found += pool.map(answer, exam.queries[1:])
        return found

    def loss(self, tokens: list[int]) -> float:
        """See Subject."""
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        known = self._complete(body).get("prompt_logprobs")
        if not known:
            raise RequestError(f"{self._base} returns no prompt_logprobs: no perplexity from it")
        pairs = zip(tokens[1:], known[1:], strict=True)
        losses = [-float(position[str(token)]["logprob"]) for token, position in pairs]
        return sum(losses) / len(losses)

    def accepted(self, tokens: list[int]) -> float | None:
        """See Subject: a server does not say."""
        return None

    def _says(self, exam: Exam, query: Query, first: int, last: int) -> bool:
        """Whether the server goes on with `query.tokens[first:last]`."""
        right = query.tokens[first:last]
        prompt = exam.tokens[: query.at] + query.tokens[:first]
        choice = self._complete(
            {
                "prompt": prompt, "max_tokens": len(right), "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "skip_special_tokens": False,
            }
        )  # fmt: skip
        ids = choice.get("token_ids")
        if ids is not None:
            return bool(ids == right)
        if self._tokenizer is None:
            raise ConfigError(
                f"{self._base} returns no token ids: give --tokenizer to compare answers as text"
            )
        again = self._tokenizer.encode(choice["text"], special=False)
        return again[: len(right)] == right

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, **body}
        choice: dict[str, Any] = self._call("POST", "/completions", "choices", body)[0]
        return choice

    def _call(self, method: str, path: str, field: str, body: Any = None) -> Any:
        """The list `field` of an answer, which has at least one entry."""
        try:
            response = self._client.request(method, self._base + path, json=body)
        except httpx.HTTPError as error:
            raise BatonError(f"{self._base}: {error or type(error).__name__}") from None
        if response.status_code != 200:
            raise BatonError(
                f"{self._base}{path} answered {response.status_code}: {response.text[:300]}"
            )
        try:
            found = response.json()[field]
            found[0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise BatonError(
                f"{self._base}{path} answered without {field!r}: {response.text[:300]}"
            ) from None
        return found
