"""The quick suite: every problem can be solved, and trivial answers score nothing."""

import importlib
import inspect
from pathlib import Path

import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.evaluation.benchmark import Benchmark, read_suite
from nemo_ext.evaluation.problems import Problem, check, problems
from nemo_ext.rl import tasks
from nemo_ext.rl.environments import make
from nemo_ext.rl.verdict import Verdict

NOWHERE = Path("/no/data/are/needed")
BENCHMARKS = read_suite("quick")[1]
ANSWERED = [each for each in BENCHMARKS if each.kind == "generate"]
IN_TEXT = [each for each in ANSWERED if each.name not in ("workplace", "bank", "programs")]


def asked(benchmark: Benchmark, problem: Problem) -> str:
    ((_, prompt),) = problem.prompts.items()
    return prompt if isinstance(prompt, str) else prompt[-1].content


def right_answer(benchmark: Benchmark, problem: Problem) -> str:
    if benchmark.generator in tasks.GENERATORS:
        solution = importlib.import_module(tasks.GENERATORS[benchmark.generator]).solution
        return str(solution(problem.task("default")))
    if benchmark.environment == "multiple_choice":
        return rf"\boxed{{{problem.reference['answer']}}}"
    return ", ".join(problem.reference["answers"] if problem.reference.get("all") else problem.reference["answers"][:1])


def scores(benchmark: Benchmark, found: list[Problem], answers: list[str]) -> list[float]:
    made = make(found[0].environment, benchmark.environment_settings)
    assert made.verify is not None
    verdicts = []
    for problem, answer in zip(found, answers, strict=True):
        verdict = made.verify(parse_response(answer), made.check(problem.reference))
        assert isinstance(verdict, Verdict) and not inspect.isawaitable(verdict)
        verdicts.append(verdict.score)
    return verdicts


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_every_benchmark_has_problems_that_can_be_verified(benchmark: Benchmark) -> None:
    found = problems(benchmark, NOWHERE, seed=1234)

    assert 20 <= len(found) == benchmark.count <= 60
    assert len({each.id for each in found}) == len(found)
    assert problems(benchmark, NOWHERE, seed=1234, limit=3) == found[:3]
    assert (benchmark.about and benchmark.max_tokens <= 512) or benchmark.kind != "generate"
    environment = make(found[0].environment, benchmark.environment_settings) if benchmark.kind == "generate" else None
    check(benchmark, environment, found)
    if benchmark.kind == "choice":
        assert all(choice.startswith(" ") for each in found for choice in each.choices)
        assert all(asked(benchmark, each).endswith("Answer:") for each in found)
    assert (benchmark.kind == "bits") == (not benchmark.higher_is_better)


@pytest.mark.parametrize("benchmark", IN_TEXT, ids=lambda each: each.name)
def test_right_answers_are_right_and_those_of_other_problems_are_not(benchmark: Benchmark) -> None:
    found = problems(benchmark, NOWHERE, seed=7, limit=12)
    answers = [right_answer(benchmark, each) for each in found]

    assert set(scores(benchmark, found, answers)) == {1}
    assert sum(scores(benchmark, found, answers[1:] + answers[:1])) < len(found) / 2


@pytest.mark.parametrize("benchmark", IN_TEXT, ids=lambda each: each.name)
def test_repeating_the_question_earns_nothing(benchmark: Benchmark) -> None:
    found = problems(benchmark, NOWHERE, seed=7, limit=6)

    assert sum(scores(benchmark, found, [asked(benchmark, each) for each in found])) == 0
    assert sum(scores(benchmark, found, [asked(benchmark, each)[-500:] for each in found])) < len(found) / 2
    assert sum(scores(benchmark, found, [""] * len(found))) == 0
