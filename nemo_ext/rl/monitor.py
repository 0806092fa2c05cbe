"""Monitor of RL runs: figures that show early that a run goes wrong, with verdicts, for all engines.

The figures have the same names in metrics.jsonl for TRL and NeMo-RL; the settings determine which of them a run has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, isnan, nan
from typing import Any

from nemo_ext.job.report import Report, tidy

PLOT = "monitor.png"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric of a run, with the limit beyond which the report warns.

    Attributes:
        name: name in metrics.jsonl.
        title: description.
        limit: largest value that is not noteworthy, or the smallest if `low` is True.
        advice: what to try if the figure is beyond its limit.
        low: True if small values are bad.
        relative: True if the limit is a multiple of the figure's mean over the first tenth of its nonzero values.
    """

    name: str
    title: str
    limit: float
    advice: str
    low: bool = False
    relative: bool = False

    def bound(self, values: Sequence[float]) -> float:
        """Return the limit, given the values of all steps; NaN if it is relative and no value is nonzero."""
        if not self.relative:
            return self.limit
        # The gradient's norm is 0 before the first reward.
        nonzero = [value for value in values if value and isfinite(value)]
        return self.limit * _mean(nonzero[: _tenth(nonzero)])

    def verdict(self, steps: Sequence[int], values: Sequence[float]) -> str:
        """Return `good`, or a phrase that says when or how often the values were beyond the limit or not finite.

        `values` has one value per step in `steps`.
        """
        finite = [isfinite(value) for value in values]
        if not finite[-1]:
            since = max((count for count, good in enumerate(finite, start=1) if good), default=0)
            return f"{_NOT_FINITE} since step {steps[since]}"
        if not all(finite):
            last = steps[max(index for index, good in enumerate(finite) if not good)]
            return f"{_NOT_FINITE} in {finite.count(False)} of {len(values)} steps, last in step {last}"
        bound, adjective = self.bound(values), "low" if self.low else "high"
        if isnan(bound):
            return _ZERO
        beyond = [value < bound if self.low else value > bound for value in values]
        recent = recent_mean(values)
        if recent < bound if self.low else recent > bound:
            return f"too {adjective} at the end"
        count = sum(beyond)
        return f"{adjective} in {count} of {len(values)} steps, but not at the end" if count else "good"


_NOT_FINITE, _ZERO = "not finite", "always 0"
_RESTART = (
    "start again from a checkpoint before that step, with a lower learning rate, bounded advantages "
    "(rl.advantage.clip) and ratios (rl.loss.importance_correction, rl.loss.dual_clip)"
)
# Limits without a source are choices.
FIGURES = (
    # NeMo-RL, docs/guides/dtensor-tp-accuracy.md: above 1.05, the engines probably compute different things.
    Figure(
        name="guards/mismatch",
        title="mean exp(|log p in generation - in training|)",
        limit=1.05,
        advice="correct the ratios (rl.loss.importance_correction), exclude outliers (rl.loss.mismatch=2), replay the "
        "routing of MoE (rl.router.replay=true), generate in the precision of training, lower rl.asynchronous.max_age",
    ),
    Figure(
        name="guards/outside_bounds",
        title="share of tokens with an importance ratio outside its bounds",
        limit=0.01,
        advice="reduce the mismatch; if it is small, widen rl.loss.importance_correction.floor and cap",
    ),
    Figure(
        name="guards/masked_responses",
        title="share of responses excluded by loss.mismatch",
        limit=0.05,
        advice="reduce the mismatch; excluded responses are mostly long ones, and a higher limit trains on them",
    ),
    Figure(
        name="guards/replayed_routes",
        title="share of generated tokens whose experts were replayed",
        limit=0.99,
        low=True,
        advice="vLLM omits experts with prefix caching and chunked prefill; set "
        "nemo_rl.set.policy.generation.vllm_kwargs.enable_prefix_caching=false",
    ),
    Figure(
        name="guards/malformed_tool_calls",
        title="share of turns with malformed tool calls",
        limit=0.05,
        advice="check that template and tool style are the model's; penalise more (rl.penalties.tool_call)",
    ),
    Figure(
        name="guards/malformed_thinking",
        title="share of turns with malformed thinking tags",
        limit=0.05,
        advice="check that the template is the model's; penalise more (rl.penalties.thinking)",
    ),
    Figure(
        name="completions/clipped_ratio",
        title="share of responses cut off at the length limit",
        limit=0.2,
        advice="raise rl.lengths.response, exclude such responses (rl.overlong_filtering=true), or reward short ones "
        "(rl.group.length_control)",
    ),
    Figure(
        name="entropy",
        title="entropy, nats per token",
        limit=0.2,
        low=True,
        relative=True,
        advice="raise rl.loss.clip_high, lower the learning rate, drop solved tasks (curriculum)",
    ),
    Figure(
        name="grad_norm",
        title="norm of the gradient before clipping",
        limit=5,
        relative=True,
        advice="lower the learning rate; bound advantages (rl.advantage.clip) and ratios "
        "(rl.loss.importance_correction, rl.loss.dual_clip)",
    ),
)


def add_section(report: Report, logs: Sequence[Mapping[str, Any]]) -> None:
    """Add a section with verdicts and a picture to a run's report, if its lines of metrics.jsonl have any figure.

    NaN and infinities are null in the lines.
    """
    points = {
        figure: [(log["step"], _number(log[figure.name])) for log in logs if figure.name in log] for figure in FIGURES
    }
    points = {figure: found for figure, found in points.items() if found}
    if not points:
        return
    rows = []
    for figure, found in points.items():
        steps, values = zip(*found, strict=True)
        verdict = figure.verdict(steps, values)
        finite = [value for value in values if isfinite(value)]
        worst = (min if figure.low else max)(finite, default=nan)
        recent = recent_mean(values)
        numbers = (f"{value:.4g}" for value in (values[0], worst, recent, figure.bound(values)))
        advice = _RESTART if verdict.startswith(_NOT_FINITE) else figure.advice
        rows.append([figure.title, *numbers, verdict, "" if verdict in ("good", _ZERO) else advice])
    heading = ("", "first:", "worst:", "last tenth:", "limit:", "verdict", "what to try")
    report.table("Monitor", heading, rows)
    columns = min(4, len(points))
    lines = ceil(len(points) / columns)
    axes = report.picture("figures of the monitor and their limits", PLOT, 5 * columns, 3.2 * lines, lines, columns)
    for axis in axes[len(points) :]:
        axis.remove()
    for axis, (figure, found) in zip(axes, points.items(), strict=False):
        axis.plot(*zip(*found, strict=True), marker="." if len(found) < 20 else "")
        axis.axhline(figure.bound([value for _, value in found]), color="0.5", linestyle="--", linewidth=1)
        tidy(axis, title=figure.title, xlabel="step")
        axis.locator_params(axis="x", integer=True)


def recent_mean(values: Sequence[float]) -> float:
    """Return the mean of the last tenth of a metric's values."""
    return _mean(values[-_tenth(values) :])


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else nan


def _number(value: float | None) -> float:
    return nan if value is None else float(value)
