"""Results computed from a store, compared with plain Python, and invariances."""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from nemo_ext.evaluation import score as scoring
from nemo_ext.evaluation.ask import Question, questions
from nemo_ext.evaluation.benchmark import Benchmark, Mode
from nemo_ext.evaluation.problems import Problem
from nemo_ext.evaluation.results import Plan, results
from nemo_ext.evaluation.store import Key, Sample, Score, Store, digest_of

Record = tuple[Sample, Score]
BENCHMARK = Benchmark(name="b", data=["x"], prompt="{{ x }}", environment="math", samples=4)


def plan(benchmark: Benchmark = BENCHMARK, problems: int = 6, **keys: Any) -> Plan:
    made = [
        Problem(id=str(n), domain="xy"[n % 2], prompts={"default": f"q{n}", **keys}, reference={}, environment="math")
        for n in range(problems)
    ]
    return Plan(benchmark=benchmark, questions=list(questions(benchmark, made)), verifier="v")


def record(question: Question, number: int, score: float | None, **keys: Any) -> Record:
    key = question.key(number)
    sample = Sample(key=key, asked=question.asked, completion_tokens=10 + number, finish_reason="stop")
    return replace(sample, **keys), Score(key=key, asked=question.asked, digest="v", score=score, found=str(score))


def drawn(planned: Plan, seed: int = 0) -> list[Record]:
    random_ = random.Random(seed)
    return [
        record(question, number, float(random_.random() < 0.3 + 0.1 * place))
        for place, question in enumerate(planned.questions)
        for number in range(planned.benchmark.samples)
    ]


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[Sequence[Record]], Store]:
    count = itertools.count()

    def write(records: Sequence[Record]) -> Store:
        store = Store(tmp_path / str(next(count)))
        for sample, score in records:
            store.add(sample)
            store.add_scores([score])
        return store

    return write


def entry(store: Store, planned: Plan) -> dict[str, Any]:
    return results(store, [planned], draws=500, seed=1)["benchmarks"]["b"]


Stored = Callable[[Sequence[Record]], Store]


def test_figures_match_plain_python(stored: Stored) -> None:
    planned = plan()
    records = drawn(planned)
    found = entry(stored(records), planned)

    by_problem = [[float(score.score or 0) for _, score in records[n * 4 : n * 4 + 4]] for n in range(6)]
    assert found["accuracy"] == pytest.approx(fmean(fmean(each) for each in by_problem))
    pass_2 = fmean(
        fmean(max(pair) for pair in itertools.combinations(each, 2)) for each in by_problem
    )  # the definition of pass@k
    assert found["metrics"]["pass@2"] == pytest.approx(pass_2)
    assert found["metrics"]["pass@4"] == pytest.approx(fmean(max(each) for each in by_problem))
    assert found["tokens"] == 11.5
    assert found["domains"]["x"] == {"accuracy": pytest.approx(fmean(fmean(each) for each in by_problem[::2])), "n": 3}


def test_further_metrics_are_averaged(stored: Stored) -> None:
    planned = plan()
    more = [
        (sample, replace(score, more={"math_verify": float(sample.key.sample % 2)})) for sample, score in drawn(planned)
    ]

    found = entry(stored(more), planned)

    assert found["metrics"]["math_verify"] == 0.5
    assert (
        found["metrics"].items() - {("math_verify", 0.5)} == entry(stored(drawn(planned)), planned)["metrics"].items()
    )
    assert found["accuracy"] == found["metrics"]["avg@4"]


def test_the_share_of_answers_with_reasoning_is_of_each_mode(stored: Stored) -> None:
    way = {"system": "thinking on"}
    planned = plan(replace(BENCHMARK, samples=1, modes={"on": Mode(**way), "off": Mode()}), problems=4)
    tokens = {"on": [5, 7, 0, 3], "off": [0, 0, None, 0]}

    found = entry(
        stored([record(q, 0, 1.0, reasoning_tokens=tokens[q.mode][int(q.problem.id)]) for q in planned.questions]),
        planned,
    )["modes"]

    assert (found["on"]["with_reasoning"], found["off"]["with_reasoning"]) == (0.75, 0)
    low, high = found["off"]["with_reasoning_interval"]
    assert low == 0 and 0.3 < high < 0.6  # Wilson's of none in four


def test_the_order_of_lines_does_not_matter(stored: Stored) -> None:
    planned = plan()
    records = drawn(planned)
    shuffled = random.Random(1).sample(records, len(records))

    assert entry(stored(shuffled), planned) == entry(stored(records), planned)


def test_more_samples_of_a_problem_change_no_other_ones(stored: Stored) -> None:
    planned = plan(problems=3)
    records = drawn(planned)
    few = [each for each in records if each[0].key.problem != "0" or each[0].key.sample < 2]
    with_few, with_all = (entry(stored(each), planned) for each in (few, records))

    assert with_few["domains"]["y"] == with_all["domains"]["y"]
    assert (with_few["missing"], with_all["missing"]) == (2, 0)


def test_scores_of_another_verifier_and_answers_to_another_question_do_not_count(stored: Stored) -> None:
    planned = plan()
    records = drawn(planned)
    other = [(sample, replace(score, digest="w", score=1.0)) for sample, score in records]
    elsewhere = [(replace(sample, asked="?"), replace(score, asked="?", score=1.0)) for sample, score in records]

    assert entry(stored([*other, *records, *elsewhere]), planned) == entry(stored(records), planned)


def test_what_failed_or_has_no_score_is_counted_and_not_averaged(stored: Stored) -> None:
    planned = plan(replace(BENCHMARK, samples=1))
    first, second, third, *rest = planned.questions
    records = [
        (record(first, 0, 1.0, problem="HTTP 400: too long")),
        record(second, 0, None),
        record(third, 0, 0.0, finish_reason="length"),
        *(record(question, 0, 1.0) for question in rest),
    ]
    found = entry(stored(records), planned)

    assert (found["failed"], found["unscored"], found["n"]) == (1, 1, 4)
    assert found["accuracy"] == 0.75
    assert found["truncated"] == 0.25
    assert found["reasons"]["HTTP 400"] == 1


def test_the_newest_score_of_a_verifier_counts(stored: Stored) -> None:
    planned = plan(replace(BENCHMARK, samples=1), problems=2)
    records = [record(question, 0, None) for question in planned.questions]
    again = [record(question, 0, 1.0) for question in planned.questions]

    assert entry(stored([*records, *again]), planned)["accuracy"] == 1


def test_a_score_is_of_the_answer_that_counts(tmp_path: Path) -> None:
    """Two workers answer the same request, and the second finishes first; a later one fails to score."""
    planned = plan(replace(BENCHMARK, samples=1), problems=1)
    right, wrong, unscored = (record(planned.questions[0], 0, score, answer=str(score)) for score in (1.0, 0.0, None))
    with Store(tmp_path) as first, Store(tmp_path) as second, Store(tmp_path) as third:
        second.add(wrong[0])
        second.add_scores([wrong[1]])
        assert [score.score for score in second.scores().values()] == [0]
        first.add(right[0])
        first.add_scores([right[1]])
        third.add_scores([unscored[1]])

        assert [sample.answer for sample in third.answers()] == ["1.0"]
        assert entry(third, planned)["accuracy"] == 1
        third.add_scores([replace(wrong[1], reference="mended")])
        assert entry(third, planned)["accuracy"] == 0, "scored again by a worker that has not answered it"


def test_majorities_and_pass_as_headlines(stored: Stored) -> None:
    rows = {"maj": 1.0, "pass": 1.0, "avg": 0.75}
    for metric, expected in rows.items():
        planned = plan(replace(BENCHMARK, metric=metric), problems=4)
        records = [record(question, number, float(number > 0)) for question in planned.questions for number in range(4)]
        found = entry(stored(records), planned)
        assert (found["metric"], found["accuracy"]) == (f"{metric}@4", expected)


def test_majorities_are_of_one_prompt_each(stored: Stored) -> None:
    """Samples of different prompts are not pooled: the headline is the mean over prompts."""
    for metric, expected in (("maj", 0.5), ("pass", 0.5), ("avg", 0.5)):
        planned = plan(replace(BENCHMARK, metric=metric), other="o")
        records = [
            record(question, number, float(question.prompt == "other"))
            for question in planned.questions
            for number in range(4)
        ]
        found = entry(stored(records), planned)
        assert found["accuracy"] == expected
        assert found["metrics"]["pass@4"] == found["metrics"]["maj@4"] == 0.5


def test_bits_are_sums_over_bytes_and_not_means_of_ratios(stored: Stored) -> None:
    benchmark = Benchmark(name="b", kind="bits", data=["x"], prompt="{{ x }}")
    planned = plan(benchmark, problems=2)
    records = [
        (sample, replace(score, more={"nats": nats, "bytes": size, "bits_per_byte": 0}))
        for (sample, score), nats, size in zip(
            [record(question, 0, 0.0) for question in planned.questions], (-10.0, -2.0), (4.0, 100.0), strict=True
        )
    ]
    found = results(stored(records), [planned], draws=500, seed=1)

    assert found["benchmarks"]["b"]["accuracy"] == pytest.approx(12 / math.log(2) / 104)
    assert found["benchmarks"]["b"]["metric"] == "bits_per_byte"
    assert not found["benchmarks"]["b"]["higher_is_better"]
    assert found["mean"] is None


def test_sensitivity_is_over_the_problems_of_all_prompts(stored: Stored) -> None:
    planned = plan(replace(BENCHMARK, samples=1), other="o")
    records = [
        record(question, 0, float(question.prompt == "other"))
        for question in planned.questions
        if question.problem.id != "5" or question.prompt == "other"
    ]
    found = entry(stored(records), planned)

    assert found["sensitivity"]["std"] == pytest.approx(2**-0.5)
    assert found["prompts"]["other"]["n"] == 6


def test_weights_of_the_grand_mean(stored: Stored) -> None:
    first = plan(replace(BENCHMARK, samples=1, weight=3.0))
    second = plan(replace(BENCHMARK, name="c", samples=1))
    records = [record(question, 0, 1.0) for question in first.questions]
    records += [record(question, 0, 0.0) for question in second.questions]

    assert results(stored(records), [first, second], draws=100, seed=1)["mean"]["accuracy"] == pytest.approx(0.75)


def test_a_truncated_last_line_is_ignored_and_a_malformed_one_is_reported(stored: Stored) -> None:
    store = stored(drawn(plan()))
    store.close()
    file = next(store.folder.glob("answers-*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert len(list(store.answers())) == 23
    file.write_bytes(b"{}]\n" + whole)
    with pytest.raises(ValueError, match=r"answers-.*:1: the line is not valid JSON"):
        list(store.answers())


def test_lone_surrogates_and_huge_numbers_can_be_stored(tmp_path: Path) -> None:
    (question,) = plan(replace(BENCHMARK, samples=1), problems=1).questions
    with Store(tmp_path / "store") as store:
        call = {"function": {"arguments": {"n": 10**30, "text": "\udc00"}}}
        store.add(Sample(key=question.key(0), asked=digest_of("\ud800", 10**30), answer="a\ud800b", tool_calls=[call]))
        (found,) = store.answers()

    assert found.answer == "a\ufffdb"
    assert found.tool_calls[0]["function"]["arguments"] == {"n": str(10**30), "text": "\ufffd"}


def test_problems_with_too_few_samples_make_no_nan(stored: Stored) -> None:
    planned = plan(replace(BENCHMARK, metric="pass"), problems=3, other="o")
    records = [each for each in drawn(planned) if each[0].key.problem != "0" or each[0].key.sample < 2]
    found = results(stored(records), [planned], draws=200, seed=1)

    assert "NaN" not in json.dumps(found)
    assert found["benchmarks"]["b"]["n"] == 2


def test_a_grand_mean_of_equal_problems_has_no_interval(stored: Stored) -> None:
    planned = plan(replace(BENCHMARK, samples=1))
    found = results(stored([record(each, 0, 1.0) for each in planned.questions]), [planned], draws=200, seed=1)

    assert found["mean"] == {"accuracy": 1.0, "interval": None, "benchmarks": 1}
    assert found["benchmarks"]["b"]["interval"][0] < 0.7


def test_acc_norm_is_by_characters_without_the_space_before_a_choice() -> None:
    """As in lm-evaluation-harness: -2.7 / 3 characters is more than -1 / 1, but -2.7 / 4 is less than -1 / 2."""
    problem = Problem(id="1", prompts={"default": "q"}, reference={}, choices=(" a", " bcd"), gold=1)
    sample = Sample(key=Key("b", "1", "default", "", 0), asked="q", logprobs=[-1.0, -2.7], sizes=[2, 4])

    measured = scoring._choice(problem, sample)

    assert (measured["acc"], measured["acc_norm"]) == (0.0, 1.0)
