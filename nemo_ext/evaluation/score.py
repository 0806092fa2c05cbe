"""Scores of samples: verifiers' verdicts, or accuracies and bits per byte computed from log-likelihoods."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_ext import __version__
from nemo_ext.chat.response import CLOSE, OPEN, Answered, Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.chat.tool_calls import read_openai_calls
from nemo_ext.evaluation.benchmark import Benchmark
from nemo_ext.evaluation.problems import Problem, metrics
from nemo_ext.evaluation.store import Sample, Score, digest_of
from nemo_ext.rl.environments import settings_of
from nemo_ext.rl.episodes import Episode, Episodes, Turn

HEADLINES = ("acc_norm", "acc", "bits_per_byte")
"""Metrics that can be the score of a `choice` benchmark (its setting `headline`); the first is the default."""


def said(
    answer: str,
    reasoning: str | None,
    tool_calls: Sequence[Mapping[str, Any]],
    *,
    tokens: int | None = None,
    finished: bool = True,
) -> Answered:
    """Parse an answer of an endpoint into reasoning, text and tool calls.

    Args:
        reasoning: reasoning trace; if None, it is split off from the text.
        tool_calls: tool calls in OpenAI's format.
        tokens: number of generated tokens; None if not counted.
        finished: False if the answer was truncated at the length limit.
    """
    calls: list[ToolCall] = []
    unreadable = {}
    for number, call in enumerate(tool_calls):
        read = read_openai_calls([call])
        calls += read.calls
        if read.problems:
            unreadable[str(call.get("id") or number)] = read.problems[0]
    if reasoning is None:
        response = parse_response(answer, tool_calls=tuple(calls), tokens=tokens, finished=finished)
        return Answered(response=response, unreadable=unreadable)
    # Not `parse_response`: a closing tag quoted in the reasoning must not make the rest of it the answer.
    ends = CLOSE if answer or calls or finished else ""
    response = Response(
        text=f"{OPEN}{reasoning}{ends}{answer}",
        thinking=reasoning.strip(),
        answer=answer.strip(),
        tool_calls=tuple(calls),
        tokens=tokens,
        finished=finished,
    )
    return Answered(response=response, unreadable=unreadable)


class Scorer:
    """Scorer of one benchmark's samples.

    Args:
        environment: name of the verifier; None if log-likelihoods are measured.
        judge: settings of the judge, for a verifier that uses one; None if there is no judge.

    Raises:
        ValueError: a required judge is missing, or a verifier setting is unknown.
    """

    def __init__(self, benchmark: Benchmark, environment: str | None, judge: Mapping[str, Any] | None) -> None:
        self.benchmark = benchmark
        self.episodes: Episodes | None = None
        self.headline = str(benchmark.settings.get("headline", HEADLINES[0]))
        if environment is None:
            if benchmark.kind == "choice" and self.headline not in HEADLINES:
                raise ValueError(
                    f"benchmark {benchmark.name}: settings.headline={self.headline}: expected one of "
                    f"{', '.join(HEADLINES)}"
                )
            self.digest = digest_of(benchmark.kind, self.headline if benchmark.kind == "choice" else None)
            return
        settings = dict(benchmark.environment_settings)
        version: Mapping[str, Any] = {"nemo_ext": __version__}
        known = settings_of(environment)
        if "judge" in known and (judge is not None or known["judge"]):
            if judge is None:
                raise ValueError(
                    f"benchmark {benchmark.name}: {environment} requires a judge; set "
                    "'evaluate.judge={endpoint: http://HOST/v1, model: NAME}'"
                )
            settings["judge"] = dict(judge)
            version = {key: value for key, value in judge.items() if key in ("model", "sampling")}
        self.episodes = Episodes({"name": environment, "settings": settings})
        without_judge = {key: value for key, value in settings.items() if key != "judge"}
        more = [dict(benchmark.metrics)] if benchmark.metrics else []
        self.digest = digest_of(environment, without_judge, version, *more)

    @property
    def converses(self) -> bool:
        """Whether the environment holds a multi-turn conversation with the model."""
        return self.episodes is not None and self.episodes.environment.begin is not None

    async def score(self, problem: Problem, sample: Sample) -> Score:
        """Score a sample; the score is None if the verifier fails, for example when its judge is down."""
        reference = digest_of(problem.reference, problem.gold)
        identity: Any = {"key": sample.key, "asked": sample.asked, "digest": self.digest, "reference": reference}
        if self.episodes is None:
            measured = _choice(problem, sample) if problem.choices else _bits(sample)
            value: float | None = measured[self.headline] if problem.choices else measured["bits_per_byte"]
            found = str(max(range(len(sample.logprobs)), key=sample.logprobs.__getitem__)) if problem.choices else None
            return Score(**identity, score=value, more=measured, found=found)
        turn = await self._replay(problem, sample)
        assert turn.verdict is not None
        verdict = turn.verdict
        value = None if verdict.outcome == "error" else verdict.score
        more = dict(verdict.more)
        if value is not None:
            more |= metrics(self.benchmark, problem, value, verdict.answer)
        return Score(**identity, score=value, why=verdict.reason, found=verdict.answer, more=more)

    async def _replay(self, problem: Problem, sample: Sample) -> Turn:
        assert self.episodes is not None
        episode = Episode(task=problem.task(sample.key.prompt), thinking_opened=False)
        answer = {"content": sample.answer, "reasoning_content": sample.reasoning, "tool_calls": sample.tool_calls}
        answers = [message for message in sample.turns if message.get("role") == "assistant"] or [answer]
        for number, message in enumerate(answers, 1):
            last = number == len(answers)
            parsed = said(
                str(message.get("content") or ""),
                message.get("reasoning_content"),
                message.get("tool_calls") or (),
                tokens=None if sample.turns else sample.completion_tokens,
                finished=sample.finish_reason != "length" or not last,
            )
            if sample.turns and self.episodes.environment.verify is not None:
                if last:
                    return await self.episodes.judged(episode, parsed.response)
                continue  # its calls need not be executed again
            turn = await self.episodes.turn(episode, parsed.response, parsed.unreadable)
            if turn.verdict is not None:
                return turn
            if not last:
                assert turn.following is not None
                episode = turn.following
        return await self.episodes.close(turn)

    async def reach(self) -> None:
        """Check that the verifier's judge, if any, can be reached; raise ValueError otherwise."""
        if self.episodes is not None and self.episodes.environment.reach is not None:
            await self.episodes.environment.reach()

    def close(self) -> None:
        """Shut down the verifier's threads."""
        if self.episodes is not None:
            self.episodes.shutdown()


def _choice(problem: Problem, sample: Sample) -> dict[str, float]:
    """Compute accuracies as in lm-evaluation-harness, and bits per byte of the correct choice.

    `acc_norm` divides log-likelihoods by the choice's number of characters, without one leading space. If there is a
    single choice, both accuracies are 1 if it is the greedy continuation.
    """
    logprobs = sample.logprobs
    bits = -logprobs[problem.gold] / math.log(2) / max(1, sample.sizes[problem.gold])
    if len(logprobs) == 1:
        greedy = float(sample.greedy[0])
        return {"acc": greedy, "acc_norm": greedy, "bits_per_byte": bits}
    # Ties go to the first choice, as in numpy's argmax.
    best = max(range(len(logprobs)), key=lambda place: logprobs[place])
    sizes = [max(1, len(choice.removeprefix(" "))) for choice in problem.choices]
    normal = max(range(len(logprobs)), key=lambda place: logprobs[place] / sizes[place])
    return {"acc": float(best == problem.gold), "acc_norm": float(normal == problem.gold), "bits_per_byte": bits}


def _bits(sample: Sample) -> dict[str, float]:
    nats, size = sum(sample.logprobs), sum(sample.sizes)
    return {"bits_per_byte": -nats / math.log(2) / max(1, size), "nats": nats, "bytes": float(size)}
