"""Requests of an evaluation, sent, stored and scored: answers, conversations with environments, log-likelihoods."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from nemo_ext.chat.sample import openai_messages
from nemo_ext.endpoint.client import Answer, Client, Request
from nemo_ext.endpoint.failures import REFUSED
from nemo_ext.evaluation.benchmark import PLAIN, Benchmark
from nemo_ext.evaluation.likelihood import Likelihoods, Scored
from nemo_ext.evaluation.play import Playing
from nemo_ext.evaluation.problems import Problem
from nemo_ext.evaluation.score import Scorer, said
from nemo_ext.evaluation.store import Key, Sample, Store, digest_of
from nemo_ext.job.seeds import digest

_AHEAD = 64
"""Number of samples in flight beyond the client's limit on concurrent requests; these are being scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Request for one problem with one prompt and in one mode; its samples differ only in their seeds.

    Attributes:
        prompt, mode: names of the prompt and of the mode.
        shown: the model's input, as the store keeps it for display.
        body: fields of the request, except the seed.
        asked: hash of the request without its seed.
    """

    benchmark: Benchmark
    problem: Problem
    prompt: str
    mode: str
    shown: Any
    body: Mapping[str, Any]
    asked: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "asked", digest_of(self.benchmark.kind, self.shown, self.body))

    def key(self, sample: int) -> Key:
        """Return the key of this question's sample with the given number."""
        return Key(self.benchmark.name, self.problem.id, self.prompt, self.mode, sample)


def questions(
    benchmark: Benchmark, problems: Iterable[Problem], modes: Sequence[str] = (), omit: Sequence[str] = ()
) -> Iterator[Question]:
    """Yield a benchmark's questions: every problem with every prompt and in each of the `modes` (empty for all).

    `omit` lists request fields to leave out because the endpoint rejects them.
    """
    for problem in problems:
        for prompt, content in problem.prompts.items():
            if benchmark.kind in ("choice", "bits"):
                shown: dict[str, Any] = {"text": content}
                if problem.choices:
                    shown = {"context": content, "choices": list(problem.choices)}
                yield Question(benchmark=benchmark, problem=problem, prompt=prompt, mode=PLAIN, shown=shown, body={})
                continue
            messages = openai_messages(problem.task(prompt).prompt, arguments_as_text=True)
            text = messages[0]["content"] if benchmark.complete else None
            for mode, variant in benchmark.modes.items():
                if modes and mode not in modes:
                    continue
                system = [] if variant.system is None else [{"role": "system", "content": variant.system}]
                max_tokens = variant.max_tokens or benchmark.max_tokens
                body = {**benchmark.sampling.body(), **variant.body, "max_tokens": max_tokens}
                if problem.thinking is not None and "chat_template_kwargs" not in body:
                    body["chat_template_kwargs"] = {"enable_thinking": problem.thinking}
                if problem.tools:
                    body["tools"] = list(problem.tools)
                body = {name: value for name, value in body.items() if name not in omit}
                shown = {"messages": [*system, *messages]} | ({"tools": body["tools"]} if "tools" in body else {})
                if text is not None:
                    shown = {"text": "\n\n".join(filter(None, (variant.system, text)))}
                yield Question(benchmark=benchmark, problem=problem, prompt=prompt, mode=mode, shown=shown, body=body)


@dataclass(kw_only=True)
class Asking:
    """Sender of an evaluation's requests; stores and scores the answers.

    Attributes:
        client: client of the endpoint, already entered with `async with`.
        likelihoods: measures log-likelihoods at the same endpoint.
        store: store of the answers and scores.
        scorers: mapping from benchmark to scorer; answers to benchmarks without one are stored without a score.
        seed: seed for all answers.
        count_reasoning: function that counts a reasoning trace's tokens if the endpoint does not; None if unavailable.
        seen: callback for each finished sample; its second argument is False if the answer was already stored.
    """

    client: Client
    likelihoods: Likelihoods
    store: Store
    scorers: Mapping[str, Scorer]
    seed: int
    count_reasoning: Callable[[str], int] | None = None
    seen: Callable[[Sample, bool], None] = field(default=lambda sample, asked: None)

    async def run(self, work: Iterable[tuple[Question, int, Sample | None]]) -> None:
        """Request and score samples.

        Args:
            work: tuples of a question, a sample number, and the sample if the store already has it, otherwise None.

        Raises:
            ValueError: the endpoint rejects the API key.
            EndpointGone: the endpoint has not responded for longer than the client's patience.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            for question, number, stored in work:
                while len(running) >= self.client.pace.limit + _AHEAD:
                    running = await _wait_for_some(running)
                running.add(asyncio.create_task(self._run_sample(question, number, stored)))
            while running:
                running = await _wait_for_some(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_sample(self, question: Question, number: int, stored: Sample | None) -> None:
        sample = stored
        if sample is None:
            self.store.add_prompt(question.asked, question.shown)
            sample = await self._request(question, number)
            self.store.add(sample)
        if not sample.problem and (scorer := self.scorers.get(question.benchmark.name)) is not None:
            self.store.add_scores([await scorer.score(question.problem, sample)])
        self.seen(sample, stored is None)

    async def _request(self, question: Question, number: int) -> Sample:
        if question.benchmark.kind in ("choice", "bits"):
            return await self._measure(question, number)
        scorer = self.scorers.get(question.benchmark.name)
        if scorer is not None and scorer.converses:
            return await self._converse(question, number, scorer)
        answer = await self._answer(question, number, 0, question.shown.get("messages"))
        return self._sample(question, number, answer)

    async def _measure(self, question: Question, number: int) -> Sample:
        identity: Any = {"key": question.key(number), "asked": question.asked}
        shown, scored = question.shown, list[Scored]()
        if "text" in shown:
            scored = [await self.likelihoods.rolling(shown["text"])]
        pairs = shown.get("pairs") or [(shown["context"], choice) for choice in shown.get("choices", ())]
        for context, group in itertools.groupby(pairs, key=itemgetter(0)):
            scored += await self.likelihoods.continuations(context, [choice for _, choice in group])
        if problem := next((text.problem for text in scored if text.problem), ""):
            return Sample(**identity, problem=problem)
        return Sample(
            **identity,
            logprobs=[text.logprob for text in scored],
            sizes=[text.bytes for text in scored],
            greedy=[text.greedy for text in scored],
            prompt_tokens=sum(text.tokens for text in scored),
        )

    async def _converse(self, question: Question, number: int, scorer: Scorer) -> Sample:
        assert scorer.episodes is not None

        async def answer(messages: Sequence[Mapping[str, Any]], turn: int) -> Answer:
            return await self._answer(question, number, turn, messages)

        playing = Playing(episodes=scorer.episodes, answer=answer, verify=False)
        play = await playing.play(question.problem.task(question.prompt), question.shown["messages"])
        answers = play.answers
        last = self._sample(question, number, answers[-1])
        if last.problem:
            return last
        if play.verdict is not None and play.verdict.outcome == "error":
            return Sample(key=last.key, asked=last.asked, problem=f"environment: {play.verdict.reason}")
        return replace(
            last,
            turns=list(play.turns),
            calls=play.counts.get("calls"),
            failed_calls=play.counts.get("failed_calls"),
            prompt_tokens=_sum([answer.prompt_tokens for answer in answers]),
            completion_tokens=_sum([answer.completion_tokens for answer in answers]),
            reasoning_tokens=_sum([self._reasoning(answer) for answer in answers]),
            seconds=sum(answer.seconds for answer in answers),
        )

    async def _answer(
        self, question: Question, number: int, turn: int, messages: Sequence[Mapping[str, Any]] | None
    ) -> Answer:
        key = question.key(number)
        seed = digest(self.seed, "evaluate", *key[:4], number, turn) >> 33  # some servers accept at most 31 bits
        body = {**question.body, "seed": seed}
        body |= {"prompt": question.shown["text"]} if messages is None else {"messages": list(messages)}
        path = "completions" if messages is None else "chat/completions"
        answer = await self.client.ask(Request(body=body, path=path))
        if answer.status == 400 and messages is not None and "max_tokens" in body:
            # Prompt and max_tokens may exceed the model's length; without max_tokens the endpoint uses what remains.
            del body["max_tokens"]
            answer = await self.client.ask(Request(body=body, path=path))
        if answer.status in REFUSED:
            raise ValueError(f"endpoint {self.client.address.url} denied access: {answer.problem}")
        return answer

    def _sample(self, question: Question, number: int, answer: Answer) -> Sample:
        return Sample(
            key=question.key(number),
            asked=question.asked,
            seed=answer.seed,
            answer=answer.answer or "",
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            reasoning_tokens=self._reasoning(answer),
            seconds=answer.seconds,
            problem=answer.problem,
        )

    def _reasoning(self, answer: Answer) -> int | None:
        """Return the reasoning trace's number of tokens, as reported by the endpoint or counted; None if unknown."""
        details: Any = answer.body
        for name in ("usage", "completion_tokens_details", "reasoning_tokens"):
            details = details.get(name) if isinstance(details, Mapping) else None
        if isinstance(details, int):
            return details
        reasoning = answer.reasoning
        if reasoning is None:
            reasoning = said(answer.answer or "", None, ()).response.thinking
        if not reasoning:
            return 0
        return None if self.count_reasoning is None else self.count_reasoning(reasoning)


async def _wait_for_some(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return pending


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
