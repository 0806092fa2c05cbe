"""Results of an evaluation: computes the content of results.json from the store."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest

from nemo_ext.evaluation.ask import Question
from nemo_ext.evaluation.benchmark import Benchmark
from nemo_ext.evaluation.store import BITS, Key, Store
from nemo_ext.job import statistics
from nemo_ext.job.garbage import without_collection
from nemo_ext.job.settings import Count
from nemo_ext.rl.verdict import Metric

_REASONED = ("with_reasoning", "with_reasoning_interval")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Questions and scoring of one benchmark.

    Attributes:
        benchmark: the benchmark, with the requested number of samples.
        verifier: digest of the verifier whose scores are used.
    """

    benchmark: Benchmark
    questions: Sequence[Question]
    verifier: str

    @property
    def wanted(self) -> int:
        """Number of requested samples over all questions."""
        return len(self.questions) * self.benchmark.samples


def results(store: Store, plans: Sequence[Plan], *, draws: Count, seed: int) -> dict[str, Any]:
    """Compute the sections `benchmarks` and `mean` of results.json, with `draws` bootstrap resamples for intervals."""
    with without_collection():  # a million samples live until the end: collections would be slow and free nothing
        return _results(store, plans, draws, seed)


def _results(store: Store, plans: Sequence[Plan], draws: int, seed: int) -> dict[str, Any]:
    places = {
        (question.benchmark.name, question.problem.id, question.prompt, question.mode): (number, index)
        for number, plan in enumerate(plans)
        for index, question in enumerate(plan.questions)
    }
    scores = {name: score for name, score in store.scores().items() if tuple(name[0][:4]) in places}
    tables = [_Table(plan) for plan in plans]
    for sample in store.answers():
        if (place := places.get(sample.key[:4])) is None:
            continue
        table = tables[place[0]]
        question = table.plan.questions[place[1]]
        if sample.asked != question.asked or sample.key.sample >= table.plan.benchmark.samples:
            continue
        if sample.problem:
            table.reasons[_short(sample.problem)] += 1
            table.failed += 1
            continue
        score = scores.get((sample.key, sample.asked, table.plan.verifier))
        if score is None or score.score is None:
            table.reasons[_short("not scored" if score is None else score.why)] += 1
            table.unscored += 1
            continue
        table.add(place[1], sample.key, score, sample)
    entries, headlines = {}, []
    for table in tables:
        entry, means = table.result(draws, seed)
        entries[table.plan.benchmark.name] = entry
        counted = table.plan.benchmark.weight > 0 and table.plan.benchmark.higher_is_better
        if means is not None and len(means) and counted and entry["metric"] != BITS:
            headlines.append((means, table.plan.benchmark.weight))
    mean = None
    if headlines:
        value, interval = statistics.grand_mean(
            [means for means, _ in headlines], [weight for _, weight in headlines], draws=draws, seed=seed
        )
        same = interval is not None and interval[0] == interval[1]  # equal values: resampling shows nothing
        mean = {"accuracy": value, "interval": None if same else _pair(interval), "benchmarks": len(headlines)}
    return {"benchmarks": entries, "mean": mean}


class _Groups(NamedTuple):
    """Samples as columns: group number (a group is a problem with one prompt), score and extracted answer of each."""

    numbers: np.ndarray
    scores: np.ndarray
    found: Sequence[str | None]


def _average(groups: _Groups) -> np.ndarray:
    return statistics.problem_means(groups.scores, groups.numbers)


def _pass(groups: _Groups, k: int) -> np.ndarray:
    return statistics.pass_at(np.bincount(groups.numbers), np.bincount(groups.numbers, groups.scores >= 1), k)


def _majority(groups: _Groups, k: int) -> np.ndarray:
    answers: list[list[str | None]] = [[] for _ in range(int(groups.numbers.max()) + 1)]
    scores: list[list[float]] = [[] for _ in answers]
    for group, score, answer in zip(groups.numbers, groups.scores, groups.found, strict=True):
        answers[group].append(answer)
        scores[group].append(float(score))
    return statistics.maj_at(answers, scores, k)


class _Table:
    """Scored samples of one benchmark, collected row by row and evaluated as columns."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.failed = self.unscored = 0
        self.reasons: Counter[str] = Counter()
        self.rows: list[tuple[Any, ...]] = []

    def add(self, question: int, key: Key, score: Any, sample: Any) -> None:
        """Append a scored sample; `question` is the index of its question in the plan."""
        tokens = sample.completion_tokens, sample.reasoning_tokens
        cut, traced = sample.finish_reason == "length", bool(sample.reasoning_tokens)
        calls = sample.calls, sample.failed_calls
        self.rows.append((question, key.sample, score.score, *tokens, cut, traced, score.found, score.more, *calls))

    def result(self, draws: int, seed: int) -> tuple[dict[str, Any], np.ndarray | None]:
        """Return the benchmark's entry in results.json, and the headline metric of each problem, [P].

        The latter is None for a benchmark of kind `bits`, or if no sample is scored.
        """
        benchmark, questions = self.plan.benchmark, self.plan.questions
        names = sorted({question.problem.id for question in questions})
        numbers = {name: number for number, name in enumerate(names)}
        self.rows.sort(key=itemgetter(0, 1))
        columns: Any = zip(*self.rows, strict=True) if self.rows else ((),) * 11
        question_numbers, _, scores, tokens, reasoning, cut, traced, self._found, more, *counts = columns
        places = np.array(question_numbers, int)
        self._scores, self._tokens, self._reasoning = (np.array(part, float) for part in (scores, tokens, reasoning))
        self._cut, self._traced = np.array(cut, bool), np.array(traced, bool)
        self._more = more if all(more) else ()
        self._problems = np.array([numbers[question.problem.id] for question in questions], int)[places]
        self._prompts = np.array([question.prompt for question in questions], str)[places]
        self._modes = np.array([question.mode for question in questions], object)[places]
        main = self._modes == (questions[0].mode if questions else None)
        calls, failed_calls = (np.array(part, float)[main] for part in counts)
        modes = list(dict.fromkeys(question.mode for question in questions))
        prompts = list(dict.fromkeys(question.prompt for question in questions))
        whole, means = self._figures(main, draws, seed)
        metric, metrics = self._metrics(main)
        entry = {
            "kind": benchmark.kind,
            "about": benchmark.about,
            "metric": metric,
            **whole,
            "wanted": self.plan.wanted,
            "failed": self.failed,
            "unscored": self.unscored,
            "missing": self.plan.wanted - len(places) - self.failed - self.unscored,
            "reasons": dict(self.reasons.most_common(8)),
            "metrics": metrics,
            "environment": questions[0].problem.environment if questions else "",
            "calls": statistics.known_mean(calls),
            "failed_calls": float(np.nansum(failed_calls) / np.nansum(calls)) if np.nansum(calls) else None,
            "weight": benchmark.weight,
            "higher_is_better": benchmark.higher_is_better and metric != BITS,
            "verifier": self.plan.verifier,
            "modes": {mode: self._figures(self._modes == mode, draws, seed)[0] for mode in modes},
            "prompts": {},
            "sensitivity": None,
            "domains": self._domains(
                main, np.array([question.problem.domain for question in questions], object)[places]
            ),
        }
        if len(prompts) > 1:
            by_prompt = {prompt: main & (self._prompts == prompt) for prompt in prompts}
            entry["prompts"] = {prompt: self._figures(rows, draws, seed)[0] for prompt, rows in by_prompt.items()}
            entry["sensitivity"] = self._sensitivity(list(by_prompt.values()), draws, seed)
        return entry, means

    def _figures(self, rows: np.ndarray, draws: int, seed: int) -> tuple[dict[str, Any], np.ndarray | None]:
        """Return figures over the samples in the mask `rows`, such as accuracy, and each problem's headline metric.

        The latter is an array [P]; None for a benchmark of kind `bits`, or if no sample is selected.
        """
        if not rows.any():
            return {
                **dict.fromkeys(("accuracy", "interval", "tokens", "reasoning_tokens", "truncated", *_REASONED)),
                "n": 0,
                "samples": 0,
            }, None
        values, sizes = self._values(rows), None
        if self.plan.benchmark.kind == "bits":
            values, sizes = -values[:, 0] / np.log(2) / np.maximum(values[:, 1], 1), np.maximum(values[:, 1], 1)
        values = values[~np.isnan(values)]
        interval = _interval(values, sizes, draws, seed)
        generated = self.plan.benchmark.kind == "generate"
        _, problems = np.unique(self._problems[rows], return_inverse=True)
        traced = statistics.problem_means(self._traced[rows].astype(float), problems) if generated else None
        accuracy = float(np.average(values, weights=sizes)) if len(values) else None
        return {
            "accuracy": accuracy,
            "interval": _pair(interval),
            "n": len(values),
            "samples": int(rows.sum()),
            "tokens": statistics.known_mean(self._tokens[rows]),
            "reasoning_tokens": statistics.known_mean(self._reasoning[rows]),
            "truncated": float(self._cut[rows].mean()) if generated else None,
            "with_reasoning": None if traced is None else float(traced.mean()),
            "with_reasoning_interval": None if traced is None else _pair(_interval(traced, None, draws, seed)),
        }, None if sizes is not None else values

    def _values(self, rows: np.ndarray) -> np.ndarray:
        """Return each problem's headline metric, `[problems]`, or for the kind `bits` nats and bytes, `[problems, 2]`.

        `rows` is a mask that selects samples.
        """
        _, problems = np.unique(self._problems[rows], return_inverse=True)
        if self.plan.benchmark.kind == "bits":
            more = [numbers for numbers, selected in zip(self._more, rows, strict=True) if selected]
            sums = [np.bincount(problems, [numbers[name] for numbers in more]) for name in ("nats", "bytes")]
            return np.stack(sums, -1)
        metric = self.plan.benchmark.metric
        if metric == "avg":
            return self._of_groups(rows, _average)
        k = self.plan.benchmark.k or self.plan.benchmark.samples
        return self._of_groups(rows, partial(_pass if metric == "pass" else _majority, k=k))

    def _of_groups(self, rows: np.ndarray, figure: Callable[[_Groups], np.ndarray]) -> np.ndarray:
        """Compute a figure for each problem and prompt, and return its means over prompts, `[problems]`.

        The figure of a group of samples is NaN if it cannot be computed; the mask `rows` selects samples.
        """
        _, prompts = np.unique(self._prompts[rows].astype(str), return_inverse=True)
        _, problems = np.unique(self._problems[rows], return_inverse=True)
        pairs, groups = np.unique(np.stack([problems, prompts], -1), axis=0, return_inverse=True)
        answers = [self._found[place] for place in np.flatnonzero(rows)]
        values = figure(_Groups(groups.reshape(-1), self._scores[rows], answers))
        known = ~np.isnan(values)
        sums, counts = (
            np.bincount(pairs[known, 0], weights, minlength=int(problems.max()) + 1)
            for weights in (values[known], None)
        )
        with np.errstate(invalid="ignore"):
            return sums / counts

    def _metrics(self, rows: np.ndarray) -> tuple[str, dict[str, float]]:
        """Return the headline metric's name, and a mapping from metric to value over the samples in the mask `rows`."""
        benchmark = self.plan.benchmark
        k = benchmark.k or benchmark.samples
        if benchmark.kind == "bits":
            name = BITS
        elif benchmark.kind == "choice":
            name = str(benchmark.settings.get("headline", "acc_norm"))
        else:
            name = f"{benchmark.metric}@{k if benchmark.metric != 'avg' else benchmark.samples}"
        if not rows.any():
            return name, {}
        _, problems = np.unique(self._problems[rows], return_inverse=True)
        more = {}
        if self._more:
            selected = [numbers for numbers, here in zip(self._more, rows, strict=True) if here]
            shared = set.intersection(*map(set, selected)) - {"nats", "bytes"}
            means = {key: _metric_mean([numbers[key] for numbers in selected], problems) for key in sorted(shared)}
            more = {key: value for key, value in means.items() if not np.isnan(value)}
            if benchmark.kind != "generate":
                return name, more
        metrics = {f"avg@{benchmark.samples}": float(self._of_groups(rows, _average).mean()), **more}
        if benchmark.samples > 1:
            figures = {
                f"pass@{size}": partial(_pass, k=size)
                for size in (*(2**power for power in range(9) if 2**power < benchmark.samples), benchmark.samples)
            }
            if any(answer is not None for answer in self._found):
                figures[f"maj@{k}"] = partial(_majority, k=k)
            for key, figure in figures.items():
                values = self._of_groups(rows, figure)
                if not np.isnan(values).all():
                    metrics[key] = float(np.nanmean(values))
        return name, metrics

    def _sensitivity(self, prompts: Sequence[np.ndarray], draws: int, seed: int) -> dict[str, Any] | None:
        """Compute the standard deviation over prompts of the headline metric, on the problems that all prompts share.

        Args:
            prompts: for each prompt, the mask that selects its samples.

        Returns:
            Mapping with `std` and its `interval`; None for the kind `bits`, or if the prompts share no scored problem.
        """
        problems = [set(self._problems[rows]) for rows in prompts]
        shared = sorted(set.intersection(*problems))
        if not shared or self.plan.benchmark.kind == "bits":
            return None
        values = np.stack([self._values(rows & np.isin(self._problems, shared)) for rows in prompts])
        values = values[:, ~np.isnan(values).any(0)]
        if not values.shape[1]:
            return None
        std, interval = statistics.sensitivity(values, draws=draws, seed=seed)
        return {"std": std, "interval": _pair(interval)}

    def _domains(self, rows: np.ndarray, domains: np.ndarray) -> dict[str, Any]:
        if len(set(domains)) < 2 or self.plan.benchmark.kind == "bits":
            return {}
        by_domain = {}
        for domain in sorted(set(domains[rows])):
            values = self._values(rows & (domains == domain))
            values = values[~np.isnan(values)]
            if len(values):
                by_domain[domain] = {"accuracy": float(values.mean()), "n": len(values)}
        return by_domain


def _metric_mean(values: Sequence[Metric], problems: np.ndarray) -> float:
    """Return the mean of a metric over problems, or for pairs the ratio of their sums; NaN if the divisor is 0."""
    if isinstance(values[0], int | float):
        return float(statistics.problem_means(np.array(values), problems).mean())
    numerator, denominator = np.sum(values, axis=0)
    return float(numerator / denominator) if denominator else float("nan")


def _interval(values: np.ndarray, sizes: np.ndarray | None, draws: int, seed: int) -> Any:
    """Return a mean's confidence interval over problems: Wilson's if all values are 0 or all are 1, else bootstrap.

    `sizes` are the problems' weights, such as their bytes; None for equal weights.
    """
    if sizes is None and len(values) > 1 and len(set(values)) == 1 and values[0] in (0, 1):
        return binomtest(int(values.sum()), len(values)).proportion_ci(method="wilson")
    return statistics.bootstrap(values, draws=draws, seed=seed, weights=sizes)


def _pair(interval: Any) -> list[float] | None:
    return None if interval is None else [float(end) for end in interval]


def _short(reason: str) -> str:
    """Strip a reason of the details that differ between samples."""
    return reason.partition(":")[0] if reason.startswith("HTTP") else reason[:80]
