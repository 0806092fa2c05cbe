"""Control of reasoning: which samples show a trace and how long it is, decided by the seed and the sample alone.

`Control` works on one sample at a time: it pairs, strips and truncates, and settles the sample's mode. Once all modes
are known, `moves_to_share` says how a task reaches its share of samples with thinking on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.chat.sample import Message, Sample, has_reasoning
from nemo_ext.job.report import markdown_table
from nemo_ext.job.seeds import uniform
from nemo_ext.job.settings import STRICT, Share, checked

ANY_TASK = "*"
OFF = "#off"

# `ChatEncoder.truncated`: a text cut to each of the token budgets that it exceeds.
Truncate = Callable[[str, Sequence[int]], Mapping[int, str]]
Mode = Literal["on", "fixed", "off"]


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class ReasoningSettings:
    """Settings of `Control`. The shares are Nemotron 3 Nano's (section 3.1.5); it does not state the budgets (choice).

    Attributes:
        strip: share of the samples with reasoning that lose it and teach the mode without.
        truncate: share of the traces that are cut to a budget; the answer stays as it was.
        budgets: budgets in tokens; a trace is cut to one of those it exceeds.
        pair: share of the samples with reasoning that come twice, with it and without (Llama-Nemotron, section 3.2).
        seed: seed of all decisions.
    """

    strip: Share = 0.10
    truncate: Share = 0.03
    budgets: tuple[PositiveInt, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    pair: Share = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.budgets and self.truncate:
            raise ValueError("reasoning.budgets is empty: name budgets in tokens, or set reasoning.truncate=0")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "ReasoningSettings":
        """Read the settings from a config's section.

        Raises:
            ValueError: a setting is wrong; the message names the key, what it holds and what it may hold.
        """
        return checked(cls, section, where="reasoning", strict=True)


@dataclass
class ReasoningReport:
    """Counts of what `Control` did.

    Attributes:
        counts: number of samples in and out, and of traces, by what happened to them.
        truncated: number of traces cut, by budget.
    """

    counts: Counter[str] = field(default_factory=Counter)
    truncated: Counter[int] = field(default_factory=Counter)

    def markdown(self) -> str:
        """Format the counts as a Markdown table."""
        rows = sorted(self.counts.items())
        rows += [(f"traces cut to {budget:,} tokens", count) for budget, count in sorted(self.truncated.items())]
        return markdown_table(("what", "count"), rows)


class Control:
    """Pairs, strips and truncates samples.

    Args:
        settings: shares, budgets, seed.
        truncate: `ChatEncoder.truncated` of the model's tokenizer; needed only if traces are to be cut.
    """

    def __init__(self, settings: ReasoningSettings, *, truncate: Truncate | None = None) -> None:
        if settings.truncate and truncate is None:
            raise ValueError(
                "reasoning.truncate cuts traces to tokens: give the tokenizer, or set reasoning.truncate=0"
            )
        self.settings = settings
        self.report = ReasoningReport()
        self._truncate = truncate

    def apply(self, sample: Sample) -> list[Sample]:
        """Return the sample as it is trained on, with `thinking` set; two samples for a pair.

        In a pair, the id of the sample without reasoning is that of the other plus `#off`.
        """
        counts = self.report.counts
        counts["samples read"] += 1
        made = self._made(sample)
        counts["samples written"] += len(made)
        for one in made:
            counts[f"samples written with thinking {'on' if one.thinking else 'off'}"] += 1
        return made

    def _made(self, sample: Sample) -> list[Sample]:
        counts = self.report.counts
        if not has_reasoning(sample.messages):
            if sample.thinking:
                counts["samples said to be on that had no trace, now off"] += 1
            return [replace(sample, thinking=False)]
        counts["samples with reasoning"] += 1
        if sample.thinking is False:
            counts["samples said to be off that had a trace, now without it"] += 1
            if can_strip(sample):
                return [stripped(sample)]
            counts["samples that cannot lose their trace, now on"] += 1
            return [self._cut(sample)]
        if self._drawn(sample, "pair") < self.settings.pair:
            if can_strip(sample):
                counts["samples paired"] += 1
                return [self._cut(sample), replace(stripped(sample), id=sample.id + OFF)]
            counts["samples not paired: nothing would be left of an answer"] += 1
        elif self._drawn(sample, "strip") < self.settings.strip:
            if can_strip(sample):
                counts["samples stripped"] += 1
                return [stripped(sample)]
            counts["samples not stripped: nothing would be left of an answer"] += 1
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
    """True if every message with a trace still says or does something without it."""
    return all(
        message.reasoning is None or bool(message.content.strip()) or bool(message.tool_calls)
        for message in sample.messages
    )


def stripped(sample: Sample) -> Sample:
    """Return the sample without its reasoning, with thinking off."""
    messages = tuple(m if m.reasoning is None else replace(m, reasoning=None) for m in sample.messages)
    return replace(sample, messages=messages, thinking=False)


def mode_of(sample: Sample) -> Mode:
    """Mode of a sample, judged by its traces where `thinking` is None; `fixed` is on and cannot be stripped."""
    if not (has_reasoning(sample.messages) if sample.thinking is None else sample.thinking):
        return "off"
    return "on" if can_strip(sample) else "fixed"


def moves_to_share(on: int, fixed: int, off: int, share: float) -> tuple[int, int, int]:
    """Number of samples to strip, of `fixed` ones to drop, and of ones without reasoning to drop, to reach a share.

    The share of samples with thinking on is reached to the nearest sample, with as few samples lost as possible. Too
    many on: samples are stripped; some are dropped only where that is not enough, because nothing would be left without
    the trace. Too few on: samples without reasoning are dropped, since a trace cannot be made up; none if no sample has
    reasoning.

    Args:
        on, fixed, off: number of samples of each `Mode`.
        share: share of the samples with thinking on.
    """
    thinking, total = on + fixed, on + fixed + off
    if thinking > share * total:
        wanted = round(thinking - share * total)
        if wanted <= on:
            return wanted, 0, 0
        # The samples left on cannot be stripped, so some are dropped.
        return on, fixed - round(share * (off + on) / (1 - share)), 0
    drop_off = total - round(thinking / share) if share and thinking else 0
    return 0, 0, max(min(drop_off, off), 0)
