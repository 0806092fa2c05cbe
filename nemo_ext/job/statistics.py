"""Statistics of scores: means, confidence intervals and tests of differences. numpy and scipy only.

Problems are resampled, never samples, as the samples of one problem are not independent (Miller, "Adding Error Bars to
Evals", arXiv:2411.00640, sections 2 and 3). All random numbers come from a seed. Results do not depend on the order of
problems.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Interval = tuple[float, float]

GROUPS = 4096
"""Maximum number of kinds of problems (distinct rows of scores) that resampling distinguishes."""
EXACT = 16
"""Maximum number of nonzero differences for which `permutation` enumerates all signs."""
CHUNK = 1 << 22
"""Maximum number of values in memory at a time."""


def problem_means(values: npt.ArrayLike, problems: npt.ArrayLike) -> Floats:
    """Mean over the samples of each problem, [P]; NaN for problems without samples.

    The first step of every headline score, which is a mean over problems of means over samples (Miller, section 3).

    Args:
        values: scores, [N].
        problems: 0-based index of each sample's problem, [N].
    """
    index = np.asarray(problems, dtype=np.int64)
    count = np.bincount(index)
    total = np.bincount(index, weights=np.asarray(values, dtype=np.float64))
    return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)


def known_mean(values: Floats) -> float | None:
    """Mean of the values that are not NaN; None if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def pass_at(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> Floats:
    """Unbiased estimate of the probability that at least one of k samples is correct, [P]; NaN with fewer samples.

    Computes 1 - C(n-c, k) / C(n, k) as a product (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, section 2.1, equation 1).

    Args:
        n: number of samples of each problem, [P].
        c: number of correct samples of each problem, [P].
    """
    total, right = np.asarray(n, dtype=np.float64), np.asarray(c, dtype=np.float64)
    wrong = np.ones(np.broadcast(total, right).shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        for drawn in range(k):
            wrong *= np.maximum(total - right - drawn, 0) / (total - drawn)
    return np.where(total < k, np.nan, 1 - wrong)


def maj_at(found: Sequence[Sequence[str | None]], scores: Sequence[Sequence[float]], k: int) -> Floats:
    """Score of the most frequent answer among each problem's first k samples, [P]; NaN with fewer than k samples.

    Majority voting (Wang et al., "Self-Consistency", arXiv:2203.11171, section 2). Scores of tied answers are averaged.
    A sample without an answer has no vote; if no sample has an answer, the score is 0.

    Args:
        found: for each problem, the normalised answers of its samples; None for a sample without an answer.
        scores: scores of the same samples; an answer's score is the mean over the samples that give it.
    """
    return np.array([_majority(a[:k], s[:k]) if len(a) >= k else np.nan for a, s in zip(found, scores, strict=True)])


def _majority(found: Sequence[str | None], scores: Sequence[float]) -> float:
    votes = Counter(answer for answer in found if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    by_answer = [np.mean([s for a, s in zip(found, scores, strict=True) if a == winner]) for winner in winners]
    return float(np.mean(by_answer))


def bootstrap(
    values: npt.ArrayLike,
    *,
    draws: int = 10_000,
    seed: int,
    level: float = 0.95,
    weights: npt.ArrayLike | None = None,
) -> Any:
    """Compute a bootstrap percentile interval of a mean over problems, which are resampled with replacement.

    Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3; problems as clusters: Miller,
    section 2.2. Problems with equal values form a kind, and the counts of kinds are drawn from a multinomial. This
    gives the same distribution at a cost that depends only on the number of kinds. Beyond `GROUPS` kinds with
    up to three columns, similar kinds are binned, which keeps the mean exact but neglects the variance within a bin.

    Args:
        values: one row per problem, [P] or [P, M].
        weights: weight of each problem in the mean, [P]; None for equal weights.

    Returns:
        (low, high), or an array [M, 2] for [P, M]; None for fewer than two problems.
    """
    rows = np.asarray(values, dtype=np.float64)
    if len(rows) < 2:
        return None
    return _percentiles(_drawn_means(rows, draws, np.random.default_rng(seed), weights), level)


def _percentiles(drawn: Floats, level: float = 0.95) -> Any:
    ends = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return (float(ends[0]), float(ends[1])) if drawn.ndim == 1 else ends.T


def _drawn_means(rows: Floats, draws: int, rng: np.random.Generator, weights: npt.ArrayLike | None = None) -> Floats:
    """Draw means over resampled problems, [draws] for rows [P] or [draws, M] for rows [P, M]."""
    columns = rows[:, None] if rows.ndim == 1 else rows
    width = columns.shape[1]
    if weights is not None:
        weight = np.asarray(weights, dtype=np.float64)[:, None]
        columns = np.hstack([columns * weight, weight])
    kinds, sizes = _kinds(columns)
    chunks = _counts(sizes / sizes.sum(), len(rows), draws, rng)
    drawn = np.concatenate([counts @ kinds for counts in chunks])
    with np.errstate(invalid="ignore"):
        means = drawn[:, :width] / (len(rows) if weights is None else drawn[:, width:])
    return means[:, 0] if rows.ndim == 1 else means


def _kinds(columns: Floats) -> tuple[Floats, Whole]:
    """Return the distinct rows, [K, M], and the number of problems with each, [K]; many distinct rows are binned."""
    kinds, sizes = np.unique(columns, axis=0, return_counts=True)
    steps = round(GROUPS ** (1 / columns.shape[1]))
    if len(kinds) <= GROUPS or steps < 16:
        return kinds, sizes
    low, high = kinds.min(axis=0), kinds.max(axis=0)
    cells = np.minimum((kinds - low) / np.where(high > low, high - low, 1) * steps, steps - 1).astype(np.int64)
    cell = np.ravel_multi_index(tuple(cells.T), (steps,) * columns.shape[1])
    _, place = np.unique(cell, return_inverse=True)
    merged = np.bincount(place, weights=sizes)
    sums = [np.bincount(place, weights=sizes * column) for column in kinds.T]
    return np.stack(sums, axis=1) / merged[:, None], merged.astype(np.int64)


def _counts(shares: Floats, total: int, draws: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Yield multinomial draws in batches, [batch, K]: counts of the kinds, whose probabilities are `shares`, [K]."""
    step = max(1, CHUNK // len(shares))
    for begin in range(0, draws, step):
        yield rng.multinomial(total, shares, size=min(step, draws - begin)).astype(np.float64)


def grand_mean(
    means: Sequence[Floats], weights: Sequence[float], *, draws: int = 10_000, seed: int = 1234, level: float = 0.95
) -> tuple[float, Interval | None]:
    """Compute a weighted mean over benchmarks, and its confidence interval.

    Problems are resampled within each benchmark (stratified), as benchmarks are fixed and problems are not (Miller,
    section 2.2). If the weights are numbers of problems, the result is the mean over all problems, like Domyn-Small's
    grand means (Table 7).

    Args:
        means: for each benchmark, the mean score of each problem, [P].
        weights: weight of each benchmark; benchmarks of weight 0 are excluded.

    Returns:
        Mean, and (low, high); None instead of an interval if a benchmark has a single problem.
    """
    pairs = zip(means, weights, strict=True)
    used = [(np.asarray(scores, dtype=np.float64), weight) for scores, weight in pairs if weight]
    if not used:
        raise ValueError("all weights of the grand mean are zero; give at least one benchmark a positive weight")
    total = sum(weight for _, weight in used)
    mean = sum(weight * float(scores.mean()) for scores, weight in used) / total
    if any(len(scores) < 2 for scores, _ in used):
        return mean, None
    drawn = np.zeros(draws)
    for number, (scores, weight) in enumerate(used):
        drawn += weight / total * _drawn_means(scores, draws, np.random.default_rng([seed, number]))
    return mean, _percentiles(drawn, level)


def mcnemar(b: int, c: int) -> float:
    """Two-sided p-value if the first model alone solves b problems, and the second alone solves c.

    Exact McNemar test (Psychometrika 12, 1947): binomial with probability 1/2.
    """
    from scipy.stats import binomtest

    return float(binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0


def permutation(differences: npt.ArrayLike, *, draws: int = 10_000, seed: int) -> float:
    """Two-sided p-value of paired differences: the share of random sign flips whose mean is at least as large.

    Fisher's sign-flip test (Good, "Permutation, Parametric and Bootstrap Tests of Hypotheses", 2005, section 3.7.2).
    All signs are enumerated for up to `EXACT` nonzero differences; for more, p = (1 + hits) / (1 + draws) (Phipson and
    Smyth, "Permutation P-values Should Never Be Zero", 2010). There is one difference per problem, [P].
    """
    nonzero = np.asarray(differences, dtype=np.float64)
    nonzero = nonzero[nonzero != 0]
    if not len(nonzero):
        return 1.0
    sizes, observed = np.abs(nonzero), abs(float(nonzero.sum()))
    least = observed - 1e-9 * float(sizes.sum())  # tolerance for rounding in reordered sums
    if len(nonzero) <= EXACT:
        signs = 1 - 2 * (np.arange(1 << len(nonzero))[:, None] >> np.arange(len(nonzero)) & 1)
        return float((np.abs(signs @ sizes) >= least).mean())
    kinds, counts = _kinds(sizes[:, None])
    rng, step, hits = np.random.default_rng(seed), max(1, CHUNK // len(kinds)), 0
    for begin in range(0, draws, step):
        plus = rng.binomial(counts, 0.5, size=(min(step, draws - begin), len(counts)))
        hits += int((np.abs((2 * plus - counts) @ kinds[:, 0]) >= least).sum())
    return (1 + hits) / (1 + draws)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Paired difference between two runs on the same problems.

    Attributes:
        mean: mean of b - a.
        interval: confidence interval of the mean, by resampling problems; by `_alike` if the differences are all equal
            scores in [0, 1]; None if there is none, as for one problem.
        p: two-sided p-value.
        test: `McNemar` or `permutation`.
        problems: number of problems.
        only_a, only_b: number of problems on which a, or b, scores higher than the other.
    """

    mean: float
    interval: Interval | None
    p: float
    test: str
    problems: int
    only_a: int
    only_b: int


def difference(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    *,
    samples: int = 1,
    draws: int = 10_000,
    seed: int,
    level: float = 0.95,
    weights: npt.ArrayLike | None = None,
) -> Difference:
    """Compare two runs by their paired difference b - a, with a bootstrap interval and a p-value.

    McNemar's test is used if both runs have one sample per problem, scored 0 or 1, otherwise permutation of signs (Dror
    et al., "The Hitchhiker's Guide to Testing Statistical Significance in NLP", ACL 2018, section 3.2).

    Args:
        a, b: mean score of each problem, [P], for the same problems in the same order.
        samples: maximum number of samples per problem.
        weights: weight of each problem, [P], such as its number of bytes; None for equal weights.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    apart = second - first
    only_a, only_b = int((apart < 0).sum()), int((apart > 0).sum())
    weight = np.ones(len(apart)) if weights is None else np.asarray(weights, dtype=np.float64)
    is_binary = bool(np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all())
    binary = weights is None and samples == 1 and is_binary
    p = mcnemar(only_a, only_b) if binary else permutation(apart * weight, draws=draws, seed=seed)
    interval = bootstrap(apart, draws=draws, seed=seed, level=level, weights=weights)
    if interval is not None and not np.ptp(apart):
        shares = weights is None and max(first.max(), second.max()) <= 1 and min(first.min(), second.min()) >= 0
        interval = _alike(float(apart[0]), len(apart), level) if shares else None
    return Difference(
        mean=float(np.average(apart, weights=weight)),
        interval=interval,
        p=p,
        test="McNemar" if binary else "permutation",
        problems=len(apart),
        only_a=only_a,
        only_b=only_b,
    )


def _alike(apart: float, problems: int, level: float) -> Interval:
    """Return the confidence interval of a difference between scores in [0, 1] that equals `apart` for every problem.

    A bootstrap interval would have no width. Instead, a share of the problems may have a difference of -1 or 1:
    at most Wilson's upper bound for 0 of P cases ("Probable Inference", 1927).
    """
    from scipy.stats import binomtest

    other = float(binomtest(0, problems).proportion_ci(level, method="wilson").high)
    return apart - other * (1 + apart), apart + other * (1 - apart)


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons, controlling the family-wise error rate.

    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6 (1979).
    """
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1)
    return [float(value) for value in adjusted]


def sensitivity(
    scores: npt.ArrayLike, *, draws: int = 10_000, seed: int = 1234, level: float = 0.95
) -> tuple[float, Interval | None]:
    """Compute prompt sensitivity, the standard deviation of the prompts' mean scores over problems, and its interval.

    Nemotron 3 Nano (appendix E and Table 8) takes the mean over eight seeds for each prompt, then the standard
    deviation of the prompts' means. The interval is the basic bootstrap interval of the variance (Davison and Hinkley,
    "Bootstrap Methods and their Application", 1997, section 5.2.1), with the same resampled problems for all prompts.
    With few problems, the standard deviation is biased upwards, even if prompts make no difference. A percentile
    interval would double this bias and never contain 0, while this one corrects it and may end below the estimate.

    Args:
        scores: mean over samples for each prompt and problem, [prompts, P].

    Returns:
        Standard deviation (n - 1), and (low, high). The interval is None for one problem, and for two prompts, where
        its coverage would be too low.
    """
    means = np.asarray(scores, dtype=np.float64)
    if means.ndim != 2 or len(means) < 2:
        raise ValueError(f"prompt sensitivity requires at least two prompts, but scores has the shape {means.shape}")
    spread = float(means.mean(axis=1).std(ddof=1))
    if means.shape[1] < 2 or len(means) < 3:
        return spread, None
    drawn = _drawn_means(means.T, draws, np.random.default_rng(seed)).var(axis=1, ddof=1)
    low, high = np.sqrt(np.maximum(2 * spread**2 - np.array(_percentiles(drawn, level)), 0))[::-1]
    return spread, (float(low), float(high))


@dataclass(frozen=True, kw_only=True)
class SignalNoise:
    """Signal-to-noise ratio of a benchmark, which shows whether it can distinguish the arms of an experiment.

    Attributes:
        signal: maximum difference between arms, divided by their mean.
        noise: standard deviation of the last checkpoints' scores, divided by their mean.
        ratio: signal divided by noise; infinite without noise.
        apart: maximum difference between arms, in the benchmark's unit.
        spread: standard deviation of the last checkpoints' scores, in the benchmark's unit.
    """

    signal: float
    noise: float
    ratio: float
    apart: float
    spread: float


def signal_and_noise(last_checkpoints: npt.ArrayLike, arms: npt.ArrayLike) -> SignalNoise:
    """Compare the difference between arms with the variation among a run's last checkpoints.

    Heineman et al., "Signal and Noise", arXiv:2508.13144 (Ai2, on OLMo's benchmarks): signal is the relative dispersion
    of models, and noise is the relative standard deviation of a run's last checkpoints. Decisions at a small scale
    transfer if their ratio is high.

    Args:
        last_checkpoints: scores of a run's last checkpoints, at least two.
        arms: scores of the arms, at least two.
    """
    last, ends = np.asarray(last_checkpoints, dtype=np.float64), np.asarray(arms, dtype=np.float64)
    if len(last) < 2 or len(ends) < 2:
        raise ValueError(
            f"signal and noise require at least two last checkpoints and two arms, not {len(last)} and {len(ends)}"
        )
    apart, spread = float(np.ptp(ends)), float(last.std(ddof=1))
    signal, noise = apart / abs(float(ends.mean())), spread / abs(float(last.mean()))
    ratio = signal / noise if noise else float("inf")
    return SignalNoise(signal=signal, noise=noise, ratio=ratio, apart=apart, spread=spread)
