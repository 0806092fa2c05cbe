"""The report of a batch job: how much, how fast, how long the answers are, how they ended, what failed."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_ext.endpoint.address import Address
from nemo_ext.generate.output import Output
from nemo_ext.generate.rows import Index
from nemo_ext.job.files import write_text
from nemo_ext.job.report import Report, tidy
from nemo_ext.job.run_directory import REPORT

DATA, PICTURE = "report.json", "lengths.png"
_SECONDS = np.geomspace(1e-4, 1e6, 2301)
"""Edges of the histogram of latencies, 1 % apart: memory does not grow with the answers."""
_TOKENS = np.unique(np.round(np.geomspace(1, 1e6, 401)))


@dataclass
class _Sums:
    """What is counted over all answers."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    seconds: Any = field(default_factory=lambda: np.zeros(len(_SECONDS) - 1, int))
    lengths: Any = field(default_factory=lambda: np.zeros(len(_TOKENS) - 1, int))

    def add(self, line: dict[str, list[Any]]) -> None:
        """Count the answers of a part, by column."""
        self.answers += len(line["finish_reason"])
        self.prompt_tokens += sum(filter(None, line["prompt_tokens"]))
        self.completion_tokens += sum(filter(None, line["completion_tokens"]))
        self.ended.update(reason or "unknown" for reason in line["finish_reason"])
        self.seconds += np.histogram([each for each in line["seconds"] if each is not None], _SECONDS)[0]
        self.lengths += np.histogram([each for each in line["completion_tokens"] if each is not None], _TOKENS)[0]

    def percentile(self, share: float) -> float | None:
        """Seconds that a share of the answers took at most; None where they were not measured."""
        if not self.seconds.sum():
            return None
        return float(_SECONDS[1:][np.searchsorted(np.cumsum(self.seconds), share * self.seconds.sum())])


def make(output: Output, index: Index, samples: int, address: Address, speed: dict[str, float]) -> str:
    """Write report.md, report.json and the histogram of lengths; returns one line for the user.

    Args:
        output: finished output.
        index: the input.
        samples: number of answers to each row.
        address: the endpoint.
        speed: seconds of this start, and the answers and tokens that came in it.
    """
    sums, failed = _Sums(), Counter[str]()
    for range_ in index.ranges:
        for part in output.parts(range_):
            sums.add(output.measured(part))
        failed.update(_reason(line["problem"]) for line in output.failures(range_))
    dead, folder = failed.total(), output.folder
    shares = {f"p{share}": sums.percentile(share / 100) for share in (50, 90, 95, 99)}
    data = {
        "rows": index.rows,
        "repeated": index.repeated,
        "samples": samples,
        "answers": sums.answers,
        "dead": dead,
        "dead_by_reason": dict(failed.most_common()),
        "prompt_tokens": sums.prompt_tokens,
        "completion_tokens": sums.completion_tokens,
        "finish_reasons": dict(sums.ended.most_common()),
        "seconds": shares,
        "this_start": speed,
    }
    write_text(folder / DATA, json.dumps(data, indent=1) + "\n")
    _page(data, sums, folder.name, address).write(folder / REPORT)
    dead_letters = f", {dead:,} failed ({folder / 'dead'})" if dead else ""
    return f"done: {folder}: {sums.answers:,} answers{dead_letters}; {folder / REPORT}"


def _reason(problem: str) -> str:
    """The problem without what differs from row to row."""
    return problem.partition(":")[0] if problem.startswith(("HTTP", "prompt")) else problem


def _page(data: dict[str, Any], sums: _Sums, title: str, address: Address) -> Report:
    answers, speed, repeated = sums.answers, data["this_start"], data["repeated"]
    mean = sums.completion_tokens / answers if answers else 0.0
    times = [f"{name} {value:,.2f}" for name, value in data["seconds"].items() if value is not None]
    facts = {
        "endpoint": f"{address.model} at {address.url}",
        "rows": f"{data['rows']:,}" + (f" ({repeated:,} more equal an earlier row)" if repeated else ""),
        "answers": f"{answers:,} of {data['rows'] * data['samples']:,} ({data['samples']} a row)",
        "failed": data["dead"],
        "tokens": f"{sums.prompt_tokens:,} of prompts, {sums.completion_tokens:,} of answers ({mean:,.1f} each)",
        "this start": f"{speed['answers']:,} answers in {speed['seconds']:,.1f} s: "
        f"{speed['answers'] / speed['seconds']:,.1f} answers/s, {speed['tokens'] / speed['seconds']:,.0f} tokens/s",
        "seconds of an answer": ", ".join(times) or "unknown",
    }
    report = Report(title).table("", ("what", "value"), facts.items())
    ended = [(reason, count, f"{count / answers:.1%}") for reason, count in data["finish_reasons"].items()]
    report.table("How the answers ended", ("finish reason", "answers", "share"), ended)
    note = "`dead/` has every one with its row; `generate.retry_dead=true` tries them again."
    report.table("What failed", ("reason", "answers"), data["dead_by_reason"].items(), note)
    _picture(report.section("Length of the answers"), sums)
    return report


def _picture(report: Report, sums: _Sums) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    (axes,) = report.picture("Tokens of the answers", PICTURE, 7, 3)
    axes.stairs(sums.lengths, _TOKENS, fill=True, color="#4477aa")
    filled = np.flatnonzero(sums.lengths)
    if len(filled):
        axes.set_xlim(_TOKENS[filled[0]] / 2, _TOKENS[filled[-1] + 1] * 2)
    tidy(axes, xscale="log", xlabel="tokens of the answer", ylabel="answers")
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:,.0f}", minor_locator=NullLocator())
