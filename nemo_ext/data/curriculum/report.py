"""Report on a curriculum: statistics of every step, a page, and a plot of the pass rates over the steps."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curriculum.plan import Candidates, Plan
from nemo_ext.data.curriculum.schedule import Floats
from nemo_ext.job.report import COLOURS, Report, tidy

PLOT = "plot.png"
DRAWN_STEPS = 2000
LATE = 0.1


@dataclass(frozen=True)
class Steps:
    """Statistics of a plan; every array has one entry per step.

    Attributes:
        target: target mean pass rate.
        mean: mean pass rate of the step's prompts.
        spread: standard deviation of their pass rates.
        off_target: share of prompts from pass-rate levels other than requested.
        domains: number of prompts, keyed by domain.
    """

    target: Floats
    mean: Floats
    spread: Floats
    off_target: Floats
    domains: Mapping[str, npt.NDArray[np.int64]]


def steps_of(plan: Plan, candidates: Candidates) -> Steps:
    """Compute the statistics of a plan."""
    steps, batch = plan.order.shape
    mean, spread = np.empty(steps), np.empty(steps)
    counts = np.zeros((len(candidates.domains), steps), dtype=np.int64)
    for begin in range(0, steps, 4096):
        rows = slice(begin, begin + 4096)
        rates = candidates.rate[plan.order[rows]]
        mean[rows], spread[rows] = rates.mean(axis=1), rates.std(axis=1)
        domains = candidates.domain[plan.order[rows]]
        for number in range(len(counts)):
            counts[number, rows] = (domains == number).sum(axis=1)
    by_name = {name: row for name, row in zip(candidates.domains, counts, strict=True) if row.any()}
    return Steps(plan.targets, mean, spread, plan.off_target / batch, by_name)


def as_json(steps: Steps) -> dict[str, Any]:
    """Return the statistics for a JSON file, as lists with one entry per step."""
    numbers = {name: getattr(steps, name).round(4).tolist() for name in ("target", "mean", "spread", "off_target")}
    return numbers | {"domains": {name: counts.tolist() for name, counts in steps.domains.items()}}


def page(
    facts: Mapping[str, str], domains: Sequence[Sequence[object]], left: Mapping[str, int], plan: Plan, steps: Steps
) -> Report:
    """Build the report: a summary, a plot of the steps, a table of domains, and unused prompts by reason."""
    report = Report(f"Curriculum of {len(plan.order):,} steps").facts(facts)
    _plot(report, plan, steps)
    columns = ("domain", "share of the steps", "prompts drawn", "mean pass rate", "prompts to train on", "repeats")
    report.table("Domains", columns, domains)
    report.table("Not in the curriculum", ("reason", "prompts"), left.items() or [("", 0)])
    return report.add(
        "Every step: `curriculum.json`. Order: `curriculum.npz`. Train on `curriculum.jsonl` in its order, with "
        "`shuffle: false`."
    )


def _plot(report: Report, plan: Plan, steps: Steps) -> None:
    """Draw the target, mean and spread of the pass rate over the steps, and the domains' shares."""
    layout: Any = {"sharex": True, "height_ratios": (3, 1, 1.2)}
    rate, off, share = report.picture("pass rate of every step", PLOT, 9, 7, 3, **layout)
    width = -(-len(steps.mean) // DRAWN_STEPS)
    number = plan.first_step + _means(np.arange(len(steps.mean), dtype=np.float64), width)
    mean, spread = _means(steps.mean, width), _means(steps.spread, width)
    low, high = np.maximum(mean - spread, 0), np.minimum(mean + spread, 1)
    rate.fill_between(number, low, high, color="#9db7d5", alpha=0.5, linewidth=0, label="± spread")
    rate.plot(number, mean, color="#1f4e8c", linewidth=1.3, label="mean of the batch")
    rate.plot(number, _means(steps.target, width), "--", color="#d1495b", linewidth=1.3, label="target mean")
    tidy(rate, title=f"Curriculum of {len(plan.order):,} steps", ylabel="pass rate", ylim=(-0.02, 1.02), legend=True)
    off.plot(number, 100 * _means(steps.off_target, width), color="#7a5195", linewidth=1.0)
    tidy(off, ylabel="off target (%)", ylim=(0, 102))
    for colour, (name, counts) in zip(itertools.cycle(COLOURS), steps.domains.items(), strict=False):
        shares = _means(100 * counts / plan.order.shape[1], width)
        share.plot(number, shares, color=colour, linewidth=1.3, label=name)
    top = 115 * max(int(counts.max()) for counts in steps.domains.values()) / plan.order.shape[1]
    legend = {"ncols": min(6, len(steps.domains)), "loc": "lower left"}
    label = "step" if width == 1 else f"step (means over {width})"
    tidy(share, xlabel=label, ylabel="share of batch (%)", ylim=(0, top), legend=legend)
    share.locator_params(axis="x", integer=True)


def _means(values: npt.NDArray[Any], width: int) -> Floats:
    """Return the means over windows of `width` steps; the last window may be shorter."""
    starts = np.arange(0, len(values), width)
    return np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
