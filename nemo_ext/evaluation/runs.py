"""Runs of `evaluate`, read for comparisons: results.json and the store's scored samples. Does not import torch.

results.json has the verifiers and headline metrics; the values of each problem are recomputed from the store.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nemo_ext.evaluation.store import ASKED, BITS, RESULTS, STORE, Store
from nemo_ext.job import statistics
from nemo_ext.job.statistics import Floats

Name = tuple[str, str]
"""Name of the prompt, and id of the problem."""
_Sample = tuple[int, float, str | None, float, bool, tuple[float, float]]


@dataclass(slots=True)
class Answers:
    """Scored samples of one question.

    Attributes:
        asked: hash of the request.
        reference: hash of the reference.
        samples: tuples of sample number, score, answer for majority votes, number of tokens (NaN if not counted),
            whether truncated, and (nats, bytes).
    """

    asked: str
    reference: str
    samples: list[_Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A run of `evaluate`, with its results and scored samples.

    Attributes:
        name: name in tables.
        folder: run directory.
        results: content of results.json.
        answers: scored samples, as `answers[benchmark][mode][prompt, problem]`.
    """

    name: str
    folder: Path
    results: Mapping[str, Any]
    answers: Mapping[str, Mapping[str, Mapping[Name, Answers]]]

    @property
    def benchmarks(self) -> Mapping[str, Mapping[str, Any]]:
        """Mapping from benchmark to its entry in results.json."""
        return self.results["benchmarks"]

    def modes(self, benchmark: str) -> list[str]:
        """Return the modes that have scored samples; the headline's mode comes first."""
        scored = self.answers.get(benchmark, {})
        named = [mode for mode in self.benchmarks[benchmark].get("modes") or () if mode in scored]
        return named or sorted(scored)


@dataclass(frozen=True)
class Values:
    """Headline metric of each problem.

    Attributes:
        problems: ids of the problems, sorted.
        values: headline metric of each problem, [P].
        weights: weight of each problem, [P]: its bytes for bits per byte; None for equal weights.
        tokens: mean tokens per answer, [P]; NaN if not counted.
        cut: share of truncated answers, [P].
        samples: maximum number of samples per problem.
        short: number of problems excluded because they have fewer samples than the metric requires.
    """

    problems: list[str]
    values: Floats
    weights: Floats | None
    tokens: Floats
    cut: Floats
    samples: int
    short: int

    @property
    def mean(self) -> float:
        """Weighted mean of the headline metric over problems."""
        return float(np.average(self.values, weights=self.weights))

    def at(self, problems: Sequence[str]) -> "Values":
        """Return the values of the given problems only, in their order."""
        place = {name: number for number, name in enumerate(self.problems)}
        rows = np.array([place[name] for name in problems], dtype=np.int64)
        weights = None if self.weights is None else self.weights[rows]
        return Values(
            list(problems), self.values[rows], weights, self.tokens[rows], self.cut[rows], self.samples, self.short
        )


def read_run(folder: Path, name: str, only: Sequence[str] = ()) -> Run:
    """Read a run of `evaluate` with its scored samples.

    Args:
        only: benchmarks to read; empty for all.

    Raises:
        ValueError: the folder is not a run of `evaluate`, or the run has not finished.
    """
    try:
        results = orjson.loads((folder / RESULTS).read_bytes())
        current = {key: set(hashes) for key, hashes in orjson.loads((folder / ASKED).read_bytes()).items()}
        entries = {key: entry for key, entry in results["benchmarks"].items() if not only or key in only}
    except FileNotFoundError:
        raise ValueError(f"runs: {folder} has no {RESULTS}; give finished runs of `nemo-ext evaluate`") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"runs: {folder / RESULTS} was not written by `nemo-ext evaluate`, or is damaged; evaluate again"
        ) from None
    store = Store(folder / STORE)
    scored: dict[str, dict[str, dict[Name, dict[str, Answers]]]] = defaultdict(lambda: defaultdict(dict))
    scores = store.scores()
    most = {key: _samples(entry) for key, entry in entries.items()}
    for sample in store.answers():
        key = sample.key
        entry = entries.get(key.benchmark)
        if entry is None or sample.problem or key.sample >= most[key.benchmark]:
            continue
        if sample.asked not in current[key.benchmark]:
            continue
        score = scores.get((key, sample.asked, str(entry.get("verifier"))))
        if score is None or score.score is None:
            continue
        requests = scored[key.benchmark][key.mode].setdefault((key.prompt, key.problem), {})
        answers = requests.pop(sample.asked, None) or Answers(sample.asked, score.reference)
        requests[sample.asked] = answers  # in order: the last entry is the newest request
        tokens = np.nan if sample.completion_tokens is None else float(sample.completion_tokens)
        sizes = score.more.get("nats", 0.0), score.more.get("bytes", 0.0)
        cut = sample.finish_reason == "length"
        answers.samples.append((key.sample, score.score, score.found, tokens, cut, sizes))
    newest = {
        benchmark: {
            mode: {name: next(reversed(requests.values())) for name, requests in questions.items()}
            for mode, questions in modes.items()
        }
        for benchmark, modes in scored.items()
    }
    return Run(name, folder, {**results, "benchmarks": entries}, newest)


def _samples(entry: Mapping[str, Any]) -> float:
    """Return the number of samples per problem, from a metric name such as avg@8; infinity if unknown."""
    found = [int(name[4:]) for name in (*(entry.get("metrics") or ()), entry.get("metric", "")) if name[:4] == "avg@"]
    return max(found, default=np.inf)


def values_of(answers: Mapping[Name, Answers], metric: str) -> Values:
    """Compute the headline metric of each problem, over its prompts and samples.

    Args:
        answers: mapping from (prompt, problem) to scored samples.
        metric: headline metric, such as avg@8, pass@8, maj@8 or bits_per_byte; other names mean the average score.
    """
    by_problem: dict[str, list[_Sample]] = defaultdict(list)
    by_prompt: dict[str, list[list[_Sample]]] = defaultdict(list)
    for (_, problem), answer in sorted(answers.items(), key=lambda item: item[0]):
        by_prompt[problem].append(sorted(answer.samples, key=lambda sample: sample[0]))
        by_problem[problem] += by_prompt[problem][-1]
    problems = sorted(by_problem)
    rows = [by_problem[problem] for problem in problems]
    kind, _, k = metric.partition("@")
    weights = None
    if kind in ("pass", "maj"):
        values = np.array([_over_prompts(kind, by_prompt[problem], int(k)) for problem in problems])
    elif metric == BITS and all(sample[5][1] for samples in rows for sample in samples):
        weights = np.array([sum(sample[5][1] for sample in samples) for samples in rows], dtype=np.float64)
        nats = np.array([sum(sample[5][0] for sample in samples) for samples in rows], dtype=np.float64)
        values = -nats / np.log(2) / weights
    else:
        means = [[np.mean([sample[1] for sample in part]) for part in by_prompt[problem]] for problem in problems]
        values = np.array([np.mean(prompts) for prompts in means], dtype=np.float64)
    tokens = np.array([np.mean([sample[3] for sample in samples]) for samples in rows], dtype=np.float64)
    good = ~np.isnan(values)
    cut = np.array([np.mean([sample[4] for sample in samples]) for samples in rows], dtype=np.float64)
    return Values(
        [problem for problem, use in zip(problems, good, strict=True) if use],
        values[good],
        None if weights is None else weights[good],
        tokens[good],
        cut[good],
        max(map(len, rows), default=0),
        int((~good).sum()),
    )


def _over_prompts(kind: str, prompts: Sequence[Sequence[_Sample]], k: int) -> float:
    """Average one problem's pass@k or maj@k over prompts; return NaN if no prompt has k samples."""
    scores = [[sample[1] for sample in samples] for samples in prompts]
    if kind == "maj":
        values = statistics.maj_at([[sample[2] for sample in samples] for samples in prompts], scores, k)
    else:
        right = [sum(score >= 1 for score in by_sample) for by_sample in scores]
        values = statistics.pass_at([*map(len, scores)], right, k)
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def benchmark_is_low(entry: Mapping[str, Any]) -> bool:
    """Whether lower values are better on a benchmark, given its entry in results.json."""
    return entry.get("metric") == BITS or not entry.get("higher_is_better", True)


def counts(entry: Mapping[str, Any]) -> bool:
    """Whether a benchmark counts in a grand mean: it has a weight, and higher values are better."""
    return float(entry.get("weight", 1)) > 0 and not benchmark_is_low(entry)


def names_of(runs: Iterable[Run]) -> list[str]:
    """Return the names of the benchmarks in any of the runs, in the order of the runs."""
    return list(dict.fromkeys(name for run in runs for name in run.benchmarks))


def entries_of(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """Map each benchmark to its entry in results.json, taken from the first run that has it."""
    return {name: entry for run in reversed(runs) for name, entry in run.benchmarks.items()}
