"""Comparisons of runs with generated stores, whose true differences are known."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.evaluation.benchmark import names
from nemo_ext.evaluation.compare import CompareSettings, compared, published
from nemo_ext.evaluation.compare_page import as_json, page, run, tables
from nemo_ext.evaluation.frontier import GRAND, frontiers
from nemo_ext.evaluation.runs import read_run, values_of
from nemo_ext.evaluation.store import Key, Sample, Score, Store
from nemo_ext.job.config import compose

PROBLEMS = 80
Chance = Callable[[int, str, str], float]
"""Probability of a correct answer by problem number, prompt and mode."""


def entry(metric: str, accuracy: float, **more: Any) -> dict[str, Any]:
    """Entry of a benchmark in results.json."""
    whole = {"metric": metric, "accuracy": accuracy, "interval": [accuracy - 0.05, accuracy + 0.05], "n": PROBLEMS}
    return {"verifier": "v", "weight": 1.0, "higher_is_better": True, "metrics": {metric: accuracy}} | whole | more


def made(
    folder: Path,
    benchmarks: Mapping[str, Chance],
    *,
    samples: int = 1,
    seed: int = 0,
    prompts: tuple[str, ...] = ("default",),
    modes: Mapping[str, float] | None = None,
    asked: Callable[[str, int], str] = lambda benchmark, problem: "",
    problems: int = PROBLEMS,
) -> Path:
    """Run directory with answers that are correct with known probabilities; `modes` has the mean tokens by mode."""
    rng = np.random.default_rng(seed)
    ways = modes or {"default": 100.0}
    entries = {}
    with Store(folder / "store") as store:
        for name, chance in benchmarks.items():
            scores = []
            for problem in range(problems):
                for prompt in prompts:
                    for mode, tokens in ways.items():
                        for sample in range(samples):
                            key = Key(name, f"p{problem:04}", prompt, mode, sample)
                            words = f"{asked(name, problem)}{name}{problem}{prompt}{mode}"
                            right = float(rng.random() < chance(problem, prompt, mode))
                            length = int(rng.normal(tokens, tokens / 5))
                            end = "length" if length > 1.3 * tokens else "stop"
                            store.add(Sample(key=key, asked=words, completion_tokens=length, finish_reason=end))
                            scores.append(Score(key=key, asked=words, digest="v", score=right, found=str(right)))
            store.add_scores(scores)
            first = [each.score or 0.0 for each in scores if each.key.mode == next(iter(ways))]
            more = {"modes": {mode: {} for mode in ways}, "truncated": 0.05, "tokens": ways[next(iter(ways))]}
            entries[name] = entry(f"avg@{samples}", float(np.mean(first)), **more)
    mean = float(np.mean([each["accuracy"] for each in entries.values()]))
    whole = {"accuracy": mean, "interval": [mean - 0.02, mean + 0.02], "benchmarks": len(entries)}
    text = {"model": folder.name, "nemo_ext": "1", "benchmarks": entries, "mean": whole, "missing": {}}
    write(folder, text)
    return folder


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes results.json and asked.json for everything in the store."""
    asked: dict[str, list[str]] = {name: [] for name in results["benchmarks"]}
    for sample in Store(folder / "store").answers():
        asked[sample.key.benchmark].append(sample.asked)
    (folder / "asked.json").write_text(json.dumps(asked))
    (folder / "results.json").write_text(json.dumps(results))


def flat(chance: float) -> Chance:
    """The same probability for all."""
    return lambda problem, prompt, mode: chance


def settings(*runs: Path, **more: Any) -> CompareSettings:
    """Settings with few draws."""
    return CompareSettings(runs=tuple(map(str, runs)), **{"draws": 500, **more})


def test_verdicts_are_true(tmp_path: Path) -> None:
    before = made(tmp_path / "before", {"up": flat(0.3), "down": flat(0.8), "same": flat(0.5)}, seed=1)
    after = made(tmp_path / "after", {"up": flat(0.7), "down": flat(0.4), "same": flat(0.5)}, seed=2)
    found = compared(settings(before, after))
    pairs = {pair.benchmark: pair for pair in found.pairs["after"]}
    assert [pairs[name].words for name in ("up", "down", "same")] == ["better", "worse", "no difference shown"]
    assert pairs["up"].difference is not None
    assert pairs["up"].difference.test == "McNemar"
    assert pairs["up"].difference.interval[0] > 0
    assert pairs["grand mean of 3"].words == "no difference shown"
    assert pairs["up"].p >= pairs["up"].difference.p  # adjusted


def test_a_run_compared_with_itself_shows_no_difference(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(0.5), "y": flat(0.5)}, samples=4)
    b = made(tmp_path / "b", {"x": flat(0.5), "y": flat(0.5)}, samples=4)
    pair, _, grand = compared(settings(a, b)).pairs["b"]
    for each in (pair, grand):
        assert (each.words, each.p, each.difference.mean) == ("no difference shown", 1.0, 0.0)
    assert pair.difference.interval == pytest.approx((-0.046, 0.046), abs=0.001)  # of 80 problems
    assert grand.difference.interval is None


def test_nothing_is_a_negative_zero(tmp_path: Path) -> None:
    a, b = (made(tmp_path / name, {"x": flat(0.5)}) for name in "ab")
    found = compared(settings(a, b))
    (pair,) = found.pairs["b"]
    slight = replace(pair, difference=replace(pair.difference, mean=-1e-5, interval=(-2e-5, -1e-5)))
    (table,) = (each for each in tables(replace(found, pairs={"b": [slight]})) if each.title == "b against a")
    assert table.rows[0][3] == "+0.0 [+0.0, +0.0]"


def test_many_harmless_benchmarks_do_not_make_an_alarm(tmp_path: Path) -> None:
    names = {f"b{number}": flat(0.5) for number in range(20)}
    a, b = made(tmp_path / "a", names, seed=5, problems=40), made(tmp_path / "b", names, seed=6, problems=40)
    pairs = compared(settings(a, b)).pairs["b"]
    assert {pair.words for pair in pairs} == {"no difference shown"}


def test_only_identical_requests_are_compared(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(0.5), "only_a": flat(0.5)})
    b = made(
        tmp_path / "b",
        {"x": flat(0.5)},
        asked=lambda benchmark, problem: "new words: " if problem < 30 else "",
        problems=PROBLEMS - 10,
    )
    found = compared(settings(a, b))
    pair, absent = found.pairs["b"]
    assert pair.difference.problems == PROBLEMS - 10 - 30
    assert pair.note == "30 with different requests or references, 10 only in a: 40 questions compared"
    assert (absent.words, absent.note) == ("not compared", "not evaluated in b")
    assert pair.note in page(found, {}).markdown()


def test_other_verifiers_and_other_references_are_not_compared(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", {"x": flat(0.5)}), made(tmp_path / "b", {"x": flat(0.5)})
    results = json.loads((b / "results.json").read_text())
    results["benchmarks"]["x"]["verifier"] = "w"
    (b / "results.json").write_text(json.dumps(results))
    (pair,) = compared(settings(a, b)).pairs["b"]
    assert (pair.words, "verifiers" in pair.note) == ("not compared", True)
    c = made(tmp_path / "c", {"x": flat(0.5)})
    with Store(c / "store") as store:
        store.add_scores([Score(**{**_fields(score), "reference": "mended"}) for score in store.scores().values()])
    (pair,) = compared(settings(a, c)).pairs["c"]
    assert (pair.difference, pair.note) == (
        None,
        "80 with different requests or references: 0 questions compared; no problem in common",
    )


def _fields(score: Score) -> dict[str, Any]:
    return {name: getattr(score, name) for name in ("key", "asked", "digest", "score")}


def test_bits_per_byte_are_weighted_by_bytes_and_lower_is_better(tmp_path: Path) -> None:
    for name, bits in (("a", 1.0), ("b", 0.8)):
        folder = tmp_path / name
        with Store(folder / "store") as store:
            for problem in range(20):
                size = 10 + 100 * (problem % 2)
                rate = bits + 0.3 * (problem % 2)
                key = Key("text", str(problem), "default", "default", 0)
                store.add(Sample(key=key, asked=str(problem), logprobs=[-rate * size * math.log(2)], sizes=[size]))
                more = {"nats": -rate * size * math.log(2), "bytes": float(size)}
                store.add_scores([Score(key=key, asked=str(problem), digest="v", score=rate, more=more)])
        text = {"model": name, "benchmarks": {"text": entry("bits_per_byte", bits)}, "mean": None}
        write(folder, text)
    found = compared(settings(tmp_path / "a", tmp_path / "b"))
    (pair,) = found.pairs["b"]
    assert pair.before == pytest.approx((10 * 1.0 + 110 * 1.3) / 120)
    assert (pair.words, pair.difference.mean) == ("better", pytest.approx(-0.2))
    assert frontiers(found.runs, settings(tmp_path / "a")) == {}  # no tokens, and no accuracy


def test_only_requests_of_the_results_are_compared(tmp_path: Path) -> None:
    """A store may also have requests of other limits and of older prompts."""
    a, b = made(tmp_path / "a", {"x": flat(0.5)}), made(tmp_path / "b", {"x": flat(0.5)}, seed=1)
    asked = json.loads((b / "asked.json").read_text())
    (b / "asked.json").write_text(json.dumps({"x": asked["x"][:12]}))
    (pair,) = compared(settings(a, b)).pairs["b"]
    assert pair.difference.problems == 12


def test_runs_are_compared_in_a_mode_that_both_have(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(0.5)}, modes={"on": 900.0, "off": 100.0})
    b = made(tmp_path / "b", {"x": flat(0.5)}, modes={"off": 100.0})
    (pair,) = compared(settings(a, b)).pairs["b"]
    assert (pair.difference.problems, pair.note) == (PROBLEMS, "in mode off, which is not the first mode of both")
    c = made(tmp_path / "c", {"x": flat(0.5)}, modes={"maybe": 100.0})
    (pair,) = compared(settings(a, c)).pairs["c"]
    assert pair.note == "no mode in common: on, off and maybe"


def test_modes_are_paired_off_before_on_with_tokens(tmp_path: Path) -> None:
    def chance(problem: int, prompt: str, mode: str) -> float:
        return 0.8 if mode == "on" else 0.3

    a = made(tmp_path / "a", {"x": chance}, modes={"on": 900.0, "off": 100.0}, samples=2)
    found = compared(settings(a))
    (pair,) = found.modes["a"]
    assert (pair.a, pair.b, pair.words, pair.difference.test) == ("off", "on", "better", "permutation")
    assert all(0 < cut < 0.2 for cut in pair.cut)
    assert pair.tokens == (pytest.approx(100, abs=10), pytest.approx(900, abs=60))
    assert "off to on" in page(found, {}).markdown()


def test_samples_beyond_the_results_are_ignored(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(1.0)}, samples=2)
    with Store(a / "store") as store:
        key = Key("x", "p0000", "default", "default", 2)
        store.add(Sample(key=key, asked="x0defaultdefault", completion_tokens=1))
        store.add_scores([Score(key=key, asked="x0defaultdefault", digest="v", score=0.0)])
    answers = read_run(a, "a").answers["x"]["default"]
    assert {len(each.samples) for each in answers.values()} == {2}


def test_headlines_of_k_samples(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(0.5)}, samples=4)
    answers = read_run(a, "a").answers["x"]["default"]
    right = np.array([sum(one[1] for one in each.samples) for _, each in sorted(answers.items())])
    assert np.allclose(values_of(answers, "avg@4").values, right / 4)
    assert np.allclose(values_of(answers, "pass@4").values, right > 0)
    assert np.allclose(values_of(answers, "maj@4").values, np.where(right == 2, 0.5, right > 2))


def test_the_newest_request_counts(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(1.0)})
    made(tmp_path / "a", {"x": flat(0.0)}, asked=lambda benchmark, problem: "again ")
    assert values_of(read_run(tmp_path / "a", "a").answers["x"]["default"], "avg@1").values.mean() == 0
    assert a == tmp_path / "a"


def test_the_front_has_the_points_that_no_other_dominates(tmp_path: Path) -> None:
    cheap = made(tmp_path / "cheap", {"x": flat(0.3), "y": flat(0.3)}, modes={"default": 100.0})
    good = made(tmp_path / "good", {"x": flat(0.9), "y": flat(0.9)}, modes={"default": 500.0})
    wasteful = made(tmp_path / "wasteful", {"x": flat(0.6), "y": flat(0.6)}, modes={"default": 900.0})
    given = settings(cheap, good, wasteful)
    points = frontiers(compared(given).runs, given)
    assert list(points) == [GRAND, "x", "y"]
    assert {point.run: point.front for point in points[GRAND]} == {"cheap": True, "good": True, "wasteful": False}
    for point in points[GRAND]:
        assert point.tokens_interval[0] < point.tokens < point.tokens_interval[1]


def test_published_values_are_shown_with_their_source(tmp_path: Path) -> None:
    a = made(tmp_path / "a", {"x": flat(0.5), "y": flat(0.5)})
    paper = tmp_path / "paper.yaml"
    values = "{x: {value: 61.2, unit: percent, where: 'Table 5, p. 12'}, z: {value: 3.1, unit: points, where: p. 1}}"
    paper.write_text(f"source: A paper\nmodels:\n  Theirs:\n    about: its model\n    values: {values}\n")
    (table,) = (each for each in tables(compared(settings(a, paper=str(paper)))) if each.title == "Compared with paper")
    assert [(row[0], row[-1]) for row in table.rows] == [("x", "61.2 (1)"), ("y", "-"), ("z", "3.1 points (2)")]
    assert table.rows[2][1] == "-"
    assert "A paper. Theirs: its model. Places in the paper: (1) Table 5, p. 12; (2) p. 1." in table.note
    paper.write_text("models: {Theirs: {values: {x: {value: 61.2, where: ''}}}}")
    with pytest.raises(ValueError, match="requires a number in `value`, and its location"):
        compared(settings(a, paper=str(paper)))


def test_differences_are_measured_against_the_last_checkpoints(tmp_path: Path) -> None:
    arms = [made(tmp_path / name, {"x": flat(chance)}) for name, chance in (("a", 0.2), ("b", 0.9))]
    last = [made(tmp_path / f"step{seed}", {"x": flat(0.5)}, seed=seed) for seed in range(3)]
    found = compared(settings(*arms, checkpoints=tuple(map(str, last))))
    assert found.noise["x"].apart > 0.5 > found.noise["x"].spread
    assert "beyond noise" in page(found, {}).markdown()


def test_the_job_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = made(tmp_path / "runs" / "a", {"x": flat(0.2), "y": flat(0.5)}, seed=1)
    b = made(tmp_path / "runs" / "b", {"x": flat(0.9), "y": flat(0.5)}, seed=2)
    words = [f"runs=[{a},{b}]", "baseline=b", f"output={tmp_path / 'out'}", "draws=200"]
    run(compose("compare", words))
    printed = capsys.readouterr().out
    page = (tmp_path / "out" / "compare.md").read_text()
    for text in ("worse", "no difference shown", "cut off", "grand mean"):
        assert text in printed
        assert text in page
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [pair["words"] for pair in numbers["pairs"]["a"][:2]] == ["worse", "no difference shown"]
    for picture in ("compare.png", "pareto.png"):
        assert (tmp_path / "out" / picture).stat().st_size > 2000
        assert f"]({picture})" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"runs": "{tmp}/none"}, "has no results.json; give finished runs of `nemo-ext evaluate`"),
        ({"runs": "{tmp}/a", "baseline": "c"}, "baseline=c is not one of the runs"),
        ({"runs": "{tmp}/a", "benchmarks": ("xx",)}, "benchmarks: no run has 'xx'"),
        ({"runs": ("{tmp}/a", "{tmp}/a")}, "runs lists .*a twice: remove one"),
        ({"runs": "{tmp}/a", "checkpoints": "{tmp}/a"}, "list the evaluations of at least two of the last"),
        ({"runs": "{tmp}/a", "paper": "nobody"}, "paper: unknown name 'nobody'"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    made(tmp_path / "a", {"x": flat(0.5)}, problems=5)

    def placed(value: Any) -> Any:
        return value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else tuple(map(placed, value))

    with pytest.raises(ValueError, match=message) as error:
        compared(CompareSettings(**{key: placed(value) for key, value in given.items()}))
    assert "\n" not in str(error.value)


def test_numbers_by_problem_are_not_written(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", {"x": flat(0.5)}), made(tmp_path / "b", {"x": flat(0.5)})
    assert "apart" not in as_json(compared(settings(a, b)), {})["pairs"]["b"][0]


@pytest.mark.parametrize("name", names("published"))
def test_the_published_values_of_the_package_can_be_shown(tmp_path: Path, name: str) -> None:
    benchmark = next(iter(next(iter(published(name)["models"].values()))["values"]))
    found = compared(settings(made(tmp_path / "a", {benchmark: flat(0.5)}, problems=5), paper=name))
    assert any(row[0] == benchmark and "(" in row[-1] + row[2] for table in tables(found) for row in table.rows)
