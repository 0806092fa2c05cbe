"""Reasoning control: which samples have a trace, and how long it is. Depends only on the seed and the sample.

`Control` works on one sample at a time: it pairs, strips and truncates traces, and sets the sample's mode. Once all
modes are known, `moves_to_share` computes the changes that bring a task to its share of samples with thinking on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.chat.sample import Message, Sample, has_reasoning
from nemo_ext.job.report import markdown_table
from nemo_ext.job.seeds import uniform
from nemo_ext.job.settings import STRICT, Share

ANY_TASK = "*"
OFF = "#off"

# Type of `ChatEncoder.truncated`: truncations of a text to all token budgets that it exceeds.
Truncate = Callable[[str, Sequence[int]], Mapping[int, str]]
Mode = Literal["on", "fixed", "off"]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasoningSettings:
    """Settings of `Control`; the shares are Nemotron 3 Nano's (section 3.1.5), which does not state budgets (choice).

    Attributes:
        strip: share of the unpaired samples with reasoning whose traces are removed, to train the mode without it.
        truncate: share of the traces that are truncated to a budget; the answer is unchanged.
        budgets: budgets in tokens; a trace is only truncated to a budget shorter than itself.
        pair: share of the samples with reasoning used twice, with and without it (Llama-Nemotron, section 3.2).
        seed: seed of all decisions.
    """

    strip: Share = 0.10
    truncate: Share = 0.03
    budgets: tuple[PositiveInt, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    pair: Share = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.budgets and self.truncate:
            raise ValueError("reasoning.budgets is empty: list budgets in tokens, or set reasoning.truncate=0")


@dataclass
class ReasoningReport:
    """Counts of the changes made by `Control`.

    Attributes:
        counts: numbers of samples and traces, keyed by what happened to them.
        truncated: number of truncated traces, keyed by budget in tokens.
    """

    counts: Counter[str] = field(default_factory=Counter)
    truncated: Counter[int] = field(default_factory=Counter)

    def markdown(self) -> str:
        """Format the counts as a Markdown table."""
        rows = sorted(self.counts.items())
        rows += [(f"traces cut to {budget:,} tokens", count) for budget, count in sorted(self.truncated.items())]
        return markdown_table(("change", "count"), rows)


class Control:
    """Applies reasoning control to samples: pairs them, and strips or truncates their traces.

    Args:
        truncate: `ChatEncoder.truncated` for the model's tokenizer; required only if traces are truncated.
    """

    def __init__(self, settings: ReasoningSettings, *, truncate: Truncate | None = None) -> None:
        if settings.truncate and truncate is None:
            raise ValueError(
                f"reasoning.truncate={settings.truncate:g} requires a tokenizer: pass truncate=, or set "
                "reasoning.truncate=0"
            )
        self.settings = settings
        self.report = ReasoningReport()
        self._truncate = truncate

    def apply(self, sample: Sample) -> list[Sample]:
        """Return the samples to train on, with `thinking` set: one, or two if the sample is paired.

        In a pair, the id of the sample without reasoning has the suffix `#off`.
        """
        counts = self.report.counts
        counts["samples read"] += 1
        samples = self._controlled(sample)
        counts["samples written"] += len(samples)
        for written in samples:
            counts[f"samples written with thinking {'on' if written.thinking else 'off'}"] += 1
        return samples

    def _controlled(self, sample: Sample) -> list[Sample]:
        counts = self.report.counts
        if not has_reasoning(sample.messages):
            if sample.thinking:
                counts["samples marked on without a trace, now off"] += 1
            return [replace(sample, thinking=False)]
        counts["samples with reasoning"] += 1
        if sample.thinking is False:
            counts["samples marked off with a trace, which is removed"] += 1
            if can_strip(sample):
                return [stripped(sample)]
            counts["samples whose trace cannot be removed, now on"] += 1
            return [self._cut(sample)]
        if self._drawn(sample, "pair") < self.settings.pair:
            if can_strip(sample):
                counts["samples paired"] += 1
                return [self._cut(sample), replace(stripped(sample), id=sample.id + OFF)]
            counts["samples not paired: an answer would be empty"] += 1
        elif self._drawn(sample, "strip") < self.settings.strip:
            if can_strip(sample):
                counts["samples stripped"] += 1
                return [stripped(sample)]
            counts["samples not stripped: an answer would be empty"] += 1
        return [self._cut(sample)]

    def _cut(self, sample: Sample) -> Sample:
        messages = tuple(self._cut_trace(sample, number, message) for number, message in enumerate(sample.messages))
        return replace(sample, messages=messages, thinking=True)

    def _cut_trace(self, sample: Sample, number: int, message: Message) -> Message:
        if message.reasoning is None:
            return message
        self.report.counts["traces"] += 1
        if self._drawn(sample, "truncate", number) >= self.settings.truncate or self._truncate is None:
            return message
        cuts = self._truncate(message.reasoning, self.settings.budgets)
        possible = sorted(cuts)
        if not possible:
            self.report.counts["traces not cut: shorter than every budget"] += 1
            return message
        budget = possible[int(self._drawn(sample, "budget", number) * len(possible))]
        self.report.truncated[budget] += 1
        return replace(message, reasoning=cuts[budget])

    def _drawn(self, sample: Sample, *purpose: str | int) -> float:
        return uniform(self.settings.seed, sample.source, sample.id, "reasoning", *purpose)


def can_strip(sample: Sample) -> bool:
    """Return whether every message with a trace also has text or tool calls, so that the trace can be removed."""
    return all(
        message.reasoning is None or bool(message.content.strip()) or bool(message.tool_calls)
        for message in sample.messages
    )


def stripped(sample: Sample) -> Sample:
    """Return the sample without its reasoning and with thinking off."""
    messages = tuple(m if m.reasoning is None else replace(m, reasoning=None) for m in sample.messages)
    return replace(sample, messages=messages, thinking=False)


def mode_of(sample: Sample) -> Mode:
    """Return whether thinking is on in a sample: `on`, `off`, or `fixed` if it is on and the traces cannot be stripped.

    If the sample's `thinking` is None, thinking is on if there is a trace.
    """
    if not (has_reasoning(sample.messages) if sample.thinking is None else sample.thinking):
        return "off"
    return "on" if can_strip(sample) else "fixed"


def moves_to_share(on: int, fixed: int, off: int, share: float) -> tuple[int, int, int]:
    """Return how many samples to strip, and how many `fixed` and `off` samples to drop, in order to reach a share.

    The share of samples with thinking on is reached to the nearest sample, dropping as few samples as possible. If too
    many are on, samples are stripped, and `fixed` samples are dropped only if that is not enough. If too few are on,
    samples without reasoning are dropped, unless no sample has reasoning.

    Args:
        on, fixed, off: number of samples in each `Mode`.
        share: desired share of samples with thinking on.
    """
    thinking, total = on + fixed, on + fixed + off
    if thinking > share * total:
        surplus = round(thinking - share * total)
        if surplus <= on:
            return surplus, 0, 0
        # The remaining samples with thinking on cannot be stripped, so some are dropped.
        return on, fixed - round(share * (off + on) / (1 - share)), 0
    drop_off = total - round(thinking / share) if share and thinking else 0
    return 0, 0, max(min(drop_off, off), 0)
