"""Report of a batch job: counts, throughput, answer lengths, finish reasons and failures."""

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
"""Bin edges of the latency histogram in seconds, 1 % apart; its memory does not grow with the number of answers."""
_TOKENS = np.unique(np.round(np.geomspace(1, 1e6, 401)))


@dataclass
class _Sums:
    """Counts over all answers: tokens, finish reasons, and histograms of latencies and lengths."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    seconds: Any = field(default_factory=lambda: np.zeros(len(_SECONDS) - 1, int))
    lengths: Any = field(default_factory=lambda: np.zeros(len(_TOKENS) - 1, int))

    def add(self, line: dict[str, list[Any]]) -> None:
        """Add the answers of a part, given as lists of values keyed by column."""
        self.answers += len(line["finish_reason"])
        self.prompt_tokens += sum(filter(None, line["prompt_tokens"]))
        self.completion_tokens += sum(filter(None, line["completion_tokens"]))
        self.ended.update(reason or "unknown" for reason in line["finish_reason"])
        self.seconds += np.histogram([time for time in line["seconds"] if time is not None], _SECONDS)[0]
        self.lengths += np.histogram([size for size in line["completion_tokens"] if size is not None], _TOKENS)[0]

    def percentile(self, share: float) -> float | None:
        """Return a latency percentile in seconds, for a share from 0 to 1; None if latencies were not measured."""
        if not self.seconds.sum():
            return None
        return float(_SECONDS[1:][np.searchsorted(np.cumsum(self.seconds), share * self.seconds.sum())])


def make(output: Output, index: Index, samples: int, address: Address, speed: dict[str, float]) -> str:
    """Write report.md, report.json and the histogram of answer lengths; return a one-line summary.

    Args:
        speed: duration of this start of the job (`seconds`), and the numbers of `answers` and `tokens` it received.
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
    """Return a failure's message without the details that differ between rows, to count failures by reason."""
    return problem.partition(":")[0] if problem.startswith(("HTTP", "prompt")) else problem


def _page(data: dict[str, Any], sums: _Sums, title: str, address: Address) -> Report:
    answers, speed, repeated = sums.answers, data["this_start"], data["repeated"]
    mean = sums.completion_tokens / answers if answers else 0.0
    times = [f"{name} {value:,.2f}" for name, value in data["seconds"].items() if value is not None]
    facts = {
        "endpoint": f"{address.model} at {address.url}",
        "rows": f"{data['rows']:,}" + (f" ({repeated:,} more are equal to an earlier row)" if repeated else ""),
        "answers": f"{answers:,} of {data['rows'] * data['samples']:,} ({data['samples']} per row)",
        "failed": data["dead"],
        "tokens": f"{sums.prompt_tokens:,} in prompts, {sums.completion_tokens:,} in answers ({mean:,.1f} per answer)",
        "this start": f"{speed['answers']:,} answers in {speed['seconds']:,.1f} s: "
        f"{speed['answers'] / speed['seconds']:,.1f} answers/s, {speed['tokens'] / speed['seconds']:,.0f} tokens/s",
        "seconds per answer": ", ".join(times) or "unknown",
    }
    report = Report(title).table("", ("what", "value"), facts.items())
    ended = [(reason, count, f"{count / answers:.1%}") for reason, count in data["finish_reasons"].items()]
    report.table("Finish reasons", ("finish reason", "answers", "share"), ended)
    note = "`dead/` has each failed request with its row; `generate.retry_dead=true` retries them."
    report.table("Failures", ("reason", "answers"), data["dead_by_reason"].items(), note)
    _picture(report.section("Length of the answers"), sums)
    return report


def _picture(report: Report, sums: _Sums) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    (axes,) = report.picture("Tokens per answer", PICTURE, 7, 3)
    axes.stairs(sums.lengths, _TOKENS, fill=True, color="#4477aa")
    filled = np.flatnonzero(sums.lengths)
    if len(filled):
        axes.set_xlim(_TOKENS[filled[0]] / 2, _TOKENS[filled[-1] + 1] * 2)
    tidy(axes, xscale="log", xlabel="tokens per answer", ylabel="answers")
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 3)), major_formatter="{x:,.0f}", minor_locator=NullLocator())
