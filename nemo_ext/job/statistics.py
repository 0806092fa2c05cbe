"""Statistics of scores: what is averaged, how sure it is, and whether two models differ. numpy and scipy only.

Problems are the unit that is drawn anew, never samples: samples of one problem are not independent (Miller, "Adding
Error Bars to Evals", arXiv:2411.00640, sections 2 and 3). Every random number comes from a seed, and but for a
statistic of one's own no result depends on the order of problems.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Interval = tuple[float, float]

GROUPS = 4096
"""Most kinds of problems that are told apart when problems are resampled."""
EXACT = 16
"""Most problems whose signs are all tried."""
CHUNK = 1 << 22
"""Numbers in memory at a time."""


def problem_means(values: npt.ArrayLike, problems: npt.ArrayLike) -> Floats:
    """Mean over the samples of each problem, [P]; NaN for a number that no sample has.

    The first step of every headline: a mean over problems of means over samples (Miller, section 3).

    Args:
        values: scores, [N].
        problems: number of each one's problem, [N], from 0.
    """
    index = np.asarray(problems, dtype=np.int64)
    count = np.bincount(index)
    total = np.bincount(index, weights=np.asarray(values, dtype=np.float64))
    return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)


def known_mean(values: Floats) -> float | None:
    """Mean of the values that are not NaN; None if there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def pass_at(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> Floats:
    """Unbiased probability that one of k samples is right, [P]; NaN where there are fewer than k samples.

    1 - C(n-c, k) / C(n, k), as a product (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, section 2.1, equation 1).

    Args:
        n: samples of each problem, [P].
        c: right ones among them, [P].
        k: samples that are drawn.
    """
    total, right = np.asarray(n, dtype=np.float64), np.asarray(c, dtype=np.float64)
    wrong = np.ones(np.broadcast(total, right).shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        for each in range(k):
            wrong *= np.maximum(total - right - each, 0) / (total - each)
    return np.where(total < k, np.nan, 1 - wrong)


def maj_at(found: Sequence[Sequence[str | None]], scores: Sequence[Sequence[float]], k: int) -> Floats:
    """Score of the most frequent answer among a problem's first k samples, [P]; NaN where there are fewer.

    Majority voting (Wang et al., "Self-Consistency", arXiv:2203.11171, section 2). Answers that are equally frequent
    share evenly. A sample without an answer has no vote; where none has one, the score is 0.

    Args:
        found: answers as they are compared, by problem and sample.
        scores: scores of the same samples; an answer's is the mean of its samples'.
        k: samples that vote.
    """
    return np.array([_majority(a[:k], s[:k]) if len(a) >= k else np.nan for a, s in zip(found, scores, strict=True)])


def _majority(found: Sequence[str | None], scores: Sequence[float]) -> float:
    votes = Counter(each for each in found if each is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [each for each, count in votes.items() if count == most]
    by_answer = [np.mean([s for a, s in zip(found, scores, strict=True) if a == winner]) for winner in winners]
    return float(np.mean(by_answer))


def bootstrap(
    values: npt.ArrayLike,
    *,
    draws: int = 10_000,
    seed: int,
    statistic: Literal["mean"] | Callable[[Floats], Floats] = "mean",
    level: float = 0.95,
    weights: npt.ArrayLike | None = None,
) -> Any:
    """Percentile interval of a mean over problems, by drawing problems with replacement.

    Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3; problems as clusters: Miller,
    section 2.2. Problems with the same values are drawn together, by a multinomial count of each kind: the same
    distribution, and a million problems cost no more than their kinds. Beyond `GROUPS` kinds of up to three columns,
    near ones are drawn as their mean: the mean stays exact, and the variance within a bin is left out.

    Args:
        values: one row a problem, [P] or [P, M].
        draws: number of draws.
        seed: their seed.
        statistic: `mean`, or a function of how often each problem was drawn, [draws, P], that gives [draws] or
            [draws, M].
        level: coverage.
        weights: weight of each problem in the mean, [P].

    Returns:
        (low, high), or [M, 2] for several columns; None for fewer than two problems.
    """
    rows = np.asarray(values, dtype=np.float64)
    if len(rows) < 2:
        return None
    if callable(statistic):
        counts = _counts(np.full(len(rows), 1 / len(rows)), len(rows), draws, np.random.default_rng(seed))
        drawn = np.concatenate([np.asarray(statistic(each)) for each in counts])
    else:
        drawn = _drawn_means(rows, draws, np.random.default_rng(seed), weights)
    return _percentiles(drawn, level)


def _percentiles(drawn: Floats, level: float = 0.95) -> Any:
    ends = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return (float(ends[0]), float(ends[1])) if drawn.ndim == 1 else ends.T


def _drawn_means(rows: Floats, draws: int, rng: np.random.Generator, weights: npt.ArrayLike | None = None) -> Floats:
    """Means over resampled problems, [draws] or [draws, M]."""
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
    """Different rows, [K, M], and how many there are of each."""
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
    """How often each kind is drawn, [some of the draws, K] at a time."""
    step = max(1, CHUNK // len(shares))
    for begin in range(0, draws, step):
        yield rng.multinomial(total, shares, size=min(step, draws - begin)).astype(np.float64)


def grand_mean(
    means: Sequence[Floats],
    weights: Sequence[float],
    *,
    draws: int = 10_000,
    seed: int = 1234,
    level: float = 0.95,
) -> tuple[float, Interval | None]:
    """Weighted mean of benchmarks' means, and its interval.

    Problems are drawn anew within each benchmark: benchmarks are fixed, problems are not (Miller, section 2.2, by
    strata). With weights that are numbers of problems it is the mean over all problems, as Domyn-Small's grand means
    (Table 7).

    Args:
        means: of each benchmark, mean scores by problem.
        weights: of each benchmark; those of 0 take no part.

    Returns:
        Mean, and (low, high); no interval where a benchmark has one problem alone.
    """
    used = [(np.asarray(each, dtype=np.float64), weight) for each, weight in zip(means, weights, strict=True) if weight]
    if not used:
        raise ValueError("grand mean: no benchmark has a weight: give one a weight above 0")
    total = sum(weight for _, weight in used)
    mean = sum(weight * float(each.mean()) for each, weight in used) / total
    if any(len(each) < 2 for each, _ in used):
        return mean, None
    drawn = np.zeros(draws)
    for number, (each, weight) in enumerate(used):
        drawn += weight / total * _drawn_means(each, draws, np.random.default_rng([seed, number]))
    return mean, _percentiles(drawn, level)


def mcnemar(b: int, c: int) -> float:
    """Two-sided p value of b problems that only the one solves against c that only the other does.

    McNemar, Psychometrika 12 (1947), exact: binomial with 1/2.
    """
    from scipy.stats import binomtest

    return float(binomtest(b, b + c, 0.5).pvalue) if b + c else 1.0


def permutation(differences: npt.ArrayLike, *, draws: int = 10_000, seed: int) -> float:
    """Two-sided p value of paired differences by problem: how often do random signs give as great a mean?

    Fisher's sign-flip test (Good, "Permutation, Parametric and Bootstrap Tests of Hypotheses", 2005, section 3.7.2).
    All signs are tried for up to `EXACT` differences that are not 0; for more, p = (1 + hits) / (1 + draws) (Phipson
    and Smyth, "Permutation P-values Should Never Be Zero", 2010).

    Args:
        differences: one number a problem, [P].
    """
    given = np.asarray(differences, dtype=np.float64)
    given = given[given != 0]
    if not len(given):
        return 1.0
    sizes, observed = np.abs(given), abs(float(given.sum()))
    least = observed - 1e-9 * float(sizes.sum())  # sums of the same numbers in another order are the same
    if len(given) <= EXACT:
        signs = 1 - 2 * (np.arange(1 << len(given))[:, None] >> np.arange(len(given)) & 1)
        return float((np.abs(signs @ sizes) >= least).mean())
    kinds, counts = _kinds(sizes[:, None])
    rng, step, hits = np.random.default_rng(seed), max(1, CHUNK // len(kinds)), 0
    for begin in range(0, draws, step):
        plus = rng.binomial(counts, 0.5, size=(min(step, draws - begin), len(counts)))
        hits += int((np.abs((2 * plus - counts) @ kinds[:, 0]) >= least).sum())
    return (1 + hits) / (1 + draws)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What lies between two runs on the same problems.

    Attributes:
        mean: mean of b - a.
        interval: interval of it, problems resampled, or `_alike`; None for one problem.
        p: two-sided p value.
        test: `McNemar` or `permutation`.
        problems: problems of both.
        only_a, only_b: problems where a, or b, is the greater.
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
    """Paired difference b - a by problem: interval by bootstrap, p by McNemar or by permutation.

    McNemar where both have one sample a problem that is right or wrong, else permutation of signs (Dror et al., "The
    Hitchhiker's Guide to Testing Statistical Significance in NLP", ACL 2018, section 3.2).

    Args:
        a, b: mean scores by problem, [P], the same problems in the same order.
        samples: most samples behind one of them.
        weights: weight of each problem, [P], such as its bytes; None for equal ones.
    """
    one, other = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    apart = other - one
    only_a, only_b = int((apart < 0).sum()), int((apart > 0).sum())
    weight = np.ones(len(apart)) if weights is None else np.asarray(weights, dtype=np.float64)
    binary = weights is None and samples == 1 and bool(np.isin(one, (0, 1)).all() and np.isin(other, (0, 1)).all())
    p = mcnemar(only_a, only_b) if binary else permutation(apart * weight, draws=draws, seed=seed)
    interval = bootstrap(apart, draws=draws, seed=seed, level=level, weights=weights)
    if interval is not None and not np.ptp(apart):
        shares = weights is None and max(one.max(), other.max()) <= 1 and min(one.min(), other.min()) >= 0
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
    """Interval of a mean difference of scores from 0 to 1 that is the same for all problems: draws say nothing then.

    Wilson's bound of 0 in P ("Probable Inference", 1927) is the share of problems that may still differ by up to 1.
    """
    from scipy.stats import binomtest

    other = float(binomtest(0, problems).proportion_ci(level, method="wilson").high)
    return apart - other * (1 + apart), apart + other * (1 - apart)


def holm(p: Sequence[float]) -> list[float]:
    """P values adjusted for being several, so that one false alarm among all is as rare as promised.

    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6 (1979).
    """
    given = np.asarray(p, dtype=np.float64)
    order = np.argsort(given, kind="stable")
    adjusted = np.empty(len(given))
    adjusted[order] = np.minimum(np.maximum.accumulate(given[order] * np.arange(len(given), 0, -1)), 1)
    return [float(each) for each in adjusted]


def sensitivity(
    scores: npt.ArrayLike, *, draws: int = 10_000, seed: int = 1234, level: float = 0.95
) -> tuple[float, Interval | None]:
    """Prompt sensitivity: standard deviation over prompts of the mean over problems, and its interval.

    Nemotron 3 Nano, appendix E and Table 8: the mean of eight seeds for each prompt, then the standard deviation of the
    prompts' means. The interval is the basic bootstrap's of the variance (Davison and Hinkley, "Bootstrap Methods and
    their Application", 1997, section 5.2.1), problems drawn anew, the same ones for all prompts. With few problems the
    standard deviation is too great, even where prompts make no difference; a percentile interval would be so twice
    over and never hold 0, while this one takes the surplus off and may end below the estimate.

    Args:
        scores: means over samples, [prompts, P].

    Returns:
        Standard deviation (n - 1), and (low, high); no interval for one problem, or for two prompts, where it would
        hold the true value too seldom.
    """
    given = np.asarray(scores, dtype=np.float64)
    if given.ndim != 2 or len(given) < 2:
        raise ValueError("prompt sensitivity: wants two prompts at least")
    spread = float(given.mean(axis=1).std(ddof=1))
    if given.shape[1] < 2 or len(given) < 3:
        return spread, None
    drawn = _drawn_means(given.T, draws, np.random.default_rng(seed)).var(axis=1, ddof=1)
    low, high = np.sqrt(np.maximum(2 * spread**2 - np.array(_percentiles(drawn, level)), 0))[::-1]
    return spread, (float(low), float(high))


def bits_per_byte(logprobs_nats: npt.ArrayLike, sizes: npt.ArrayLike) -> float:
    """Bits per UTF-8 byte of texts: their negative log-likelihoods, together, over their bytes, together.

    Gao et al., "The Pile", arXiv:2101.00027, section 3.1.

    Args:
        logprobs_nats: natural log-likelihood of each text, [N].
        sizes: bytes of each, [N].
    """
    return -float(np.asarray(logprobs_nats).sum()) / float(np.log(2)) / float(np.asarray(sizes).sum())


@dataclass(frozen=True, kw_only=True)
class SignalNoise:
    """Whether a benchmark can decide between arms.

    Attributes:
        signal: greatest difference between arms, over their mean.
        noise: standard deviation of the last checkpoints, over their mean.
        ratio: signal over noise; infinite without noise.
        apart: greatest difference between arms, in the benchmark's unit.
        spread: standard deviation of the last checkpoints, in the benchmark's unit.
    """

    signal: float
    noise: float
    ratio: float
    apart: float
    spread: float


def signal_and_noise(last_checkpoints: npt.ArrayLike, arms: npt.ArrayLike) -> SignalNoise:
    """Difference between arms beside what the last checkpoints of one run differ by anyway.

    Heineman et al., "Signal and Noise", arXiv:2508.13144 (Ai2, on OLMo's benchmarks): signal is the relative dispersion
    of models, noise the relative standard deviation of a run's last checkpoints; decisions made at a small scale hold
    where their ratio is high.

    Args:
        last_checkpoints: scores of the last checkpoints of one run, [two at least].
        arms: scores of the arms, [two at least].
    """
    last, ends = np.asarray(last_checkpoints, dtype=np.float64), np.asarray(arms, dtype=np.float64)
    if len(last) < 2 or len(ends) < 2:
        raise ValueError("signal and noise: wants two last checkpoints and two arms at least")
    apart, spread = float(np.ptp(ends)), float(last.std(ddof=1))
    signal, noise = apart / abs(float(ends.mean())), spread / abs(float(last.mean()))
    ratio = signal / noise if noise else float("inf")
    return SignalNoise(signal=signal, noise=noise, ratio=ratio, apart=apart, spread=spread)
