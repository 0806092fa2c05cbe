"""The `nemo-ext compare` job: writes a comparison's tables, plots and files. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table as RichTable

from nemo_ext.evaluation.compare import CompareSettings, Comparison, Pair, compared
from nemo_ext.evaluation.frontier import ACCURACIES, FRONTIERS, Point, frontiers, plot_accuracies, plot_frontiers
from nemo_ext.evaluation.runs import Run, benchmark_is_low, entries_of, names_of
from nemo_ext.evaluation.store import BITS
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.report import Report, Table
from nemo_ext.job.settings import checked

JSON = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_NOT_PRINTED = ("Further measures", "Answers")
"""Titles of the tables that are written to compare.md but not printed."""


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext compare`: compare the runs, write the files and print the tables.

    Raises:
        ValueError: a setting, a run or a paper is invalid.
    """
    settings = checked(CompareSettings, config)
    show(write(settings), Path(settings.output).expanduser())


def write(settings: CompareSettings) -> Comparison:
    """Compare runs, write all files of the comparison into its folder, and return the comparison.

    Raises:
        ValueError: a run or a paper is invalid.
    """
    output = Path(settings.output).expanduser()
    comparison = compared(settings)
    points = frontiers(comparison.runs, settings)
    with only_run_in(output, "output"):
        for name in (ACCURACIES, FRONTIERS):
            (output / name).unlink(missing_ok=True)
        write_text(output / "compare.json", orjson.dumps(as_json(comparison, points), option=JSON).decode())
        page(comparison, points).write(output / "compare.md")
    return comparison


def as_json(comparison: Comparison, points: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    """Return all numbers of a comparison, for compare.json; `points` maps benchmarks to the points of their plots."""
    return {
        "level": comparison.level,
        "baseline": comparison.runs[0].name,
        "runs": {run.name: {"folder": str(run.folder), **_summary(run)} for run in comparison.runs},
        "pairs": {name: [pair.as_json() for pair in pairs] for name, pairs in comparison.pairs.items()},
        "modes": {name: [pair.as_json() for pair in pairs] for name, pairs in comparison.modes.items()},
        "signal_and_noise": {name: asdict(ratio) for name, ratio in comparison.noise.items()},
        "frontiers": {name: [asdict(point) for point in frontier] for name, frontier in points.items()},
        "published": list(comparison.papers),
    }


def _summary(run: Run) -> dict[str, Any]:
    """Return an excerpt of a run's results.json, without the figures for each domain."""
    entries = {name: {k: v for k, v in entry.items() if k != "domains"} for name, entry in run.benchmarks.items()}
    return {key: run.results.get(key) for key in ("model", "endpoint", "seed", "nemo_ext", "mean")} | {
        "benchmarks": entries
    }


def tables(comparison: Comparison) -> list[Table[str]]:
    """Return the comparison's non-empty tables."""
    all_of_them = [
        _side_by_side(comparison),
        *(_against(comparison, name) for name in comparison.pairs),
        _modes(comparison),
        *(_published(comparison, paper) for paper in comparison.papers),
        _sensitivity(comparison),
        _noise(comparison),
        _further(comparison),
        _counted(comparison),
        _excluded(comparison),
    ]
    return [table for table in all_of_them if table.rows]


def _side_by_side(comparison: Comparison) -> Table[str]:
    names = [run.name for run in comparison.runs]
    rows = [
        [name, str(entry.get("metric")), *(_cell(run.benchmarks.get(name)) for run in comparison.runs)]
        for name, entry in entries_of(comparison.runs).items()
    ]
    means = [run.results.get("mean") for run in comparison.runs]
    if any(means):
        shown = [mean and _with_interval({}, mean["accuracy"], mean.get("interval")) for mean in means]
        counts = [f"{text} of {mean['benchmarks']}" if mean else "-" for text, mean in zip(shown, means, strict=True)]
        rows.append(["grand mean", "", *counts])
    text = "In percent, with the interval over problems; bits per byte are unscaled, and lower is better."
    return Table("Side by side", ("benchmark", "measure", *names), rows, text)


def _cell(entry: Mapping[str, Any] | None) -> str:
    """Format a result's accuracy, interval and share of truncated answers; "-" if there is no result.

    `entry` is the benchmark's entry in results.json.
    """
    if not entry or entry.get("accuracy") is None:
        return "-"
    truncated = entry.get("truncated")
    cut = f", {truncated:.1%} cut off" if truncated else ""
    return _with_interval(entry, entry["accuracy"], entry.get("interval")) + cut


def _with_interval(entry: Mapping[str, Any], value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    ends = "" if interval is None else f" [{_value(entry, interval[0], sign)}, {_value(entry, interval[1], sign)}]"
    return _value(entry, value, sign) + ends


def _value(entry: Mapping[str, Any], value: float, sign: str = "") -> str:
    """Format a score or a difference: in bits per byte if that is the entry's metric, otherwise in percent.

    `entry` is the benchmark's entry in results.json, and `sign` the sign option of the format specification.
    """
    return f"{value:{sign}z.3f}" if entry.get("metric") == BITS else f"{100 * value:{sign}z.1f}"


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


AGAINST = (
    *("benchmark", "before", "after", "difference", "kept", "tokens", "cut off"),
    *("p", "adjusted p", "problems", "verdict"),
)
"""Column headings of a table of paired comparisons."""


def _against(comparison: Comparison, name: str) -> Table[str]:
    entries = entries_of(comparison.runs)
    rows = [pair_row(pair, entries.get(pair.benchmark, {})) for pair in comparison.pairs[name]]
    kept = [
        pair.after / pair.before
        for pair in comparison.pairs[name]
        if pair.before and pair.after is not None and pair.apart is not None
        if not benchmark_is_low(entries[pair.benchmark])
    ]
    text = ""
    if len(kept) > 1:
        share = f"{median(kept):.1%} over {len(kept)} benchmarks"
        text = f"Median accuracy kept: {share} (Nemotron 3 Nano, section 4.3)."
    return Table(f"{name} against {comparison.runs[0].name}", AGAINST, rows, text)


def pair_row(pair: Pair, entry: Mapping[str, Any]) -> list[str]:
    """Return the cells of a paired comparison for the columns `AGAINST`.

    `entry` is the benchmark's entry in results.json.
    """
    difference = pair.difference
    if difference is None or pair.before is None or pair.after is None:
        return [pair.benchmark, *["-"] * 9, pair.words]
    return [
        pair.benchmark,
        _value(entry, pair.before),
        _value(entry, pair.after),
        _with_interval(entry, difference.mean, difference.interval, "+"),
        f"{pair.after / pair.before:.1%}" if pair.before and not benchmark_is_low(entry) else "-",
        " to ".join(map(_number, pair.tokens)) if any(pair.tokens) else "-",
        " to ".join("-" if cut is None else f"{cut:.1%}" for cut in pair.cut) if any(pair.cut) else "-",
        _p(difference.p),
        _p(pair.p),
        f"{difference.problems:,}",
        pair.words,
    ]


def _modes(comparison: Comparison) -> Table[str]:
    rows = []
    for run in comparison.runs:
        for pair in comparison.modes.get(run.name, ()):
            entry = run.benchmarks[pair.benchmark]
            rows.append([run.name, f"{pair.a} to {pair.b}", *pair_row(pair, entry)])
    text = "Each mode compared with the first on the same problems, such as reasoning off and on."
    return Table("Modes", ("run", "modes", *AGAINST), rows, text)


def _published(comparison: Comparison, paper: Mapping[str, Any]) -> Table[str]:
    models = paper["models"]
    ours = names_of(comparison.runs)
    theirs = list(dict.fromkeys(name for model in models.values() for name in model["values"]))
    places = list(dict.fromkeys(value["where"] for model in models.values() for value in model["values"].values()))
    rows = []
    for name in (*ours, *(name for name in theirs if name not in ours)):
        cells = [_part_cell(run, name) for run in comparison.runs]
        rows.append([name, *cells, *(_published_cell(model["values"].get(name), places) for model in models.values())])
    text = [f"Published values: {paper.get('source', 'no source given')}."]
    text += [f"{name}: {model['about']}." for name, model in models.items() if model.get("about")]
    text += ["Places in the paper:", "; ".join(f"({number}) {place}" for number, place in enumerate(places, 1)) + "."]
    columns = ("benchmark", *(run.name for run in comparison.runs), *models)
    return Table(f"Compared with {paper['name']}", columns, rows, " ".join(text))


def _part_cell(run: Run, name: str) -> str:
    """Format a run's result on BENCHMARK or BENCHMARK:PART (a metric, a domain, or the `deviation` over prompts)."""
    benchmark, _, part = name.partition(":")
    entry = run.benchmarks.get(benchmark)
    if entry is None or not part:
        return _cell(entry)
    parts = {name: domain["accuracy"] for name, domain in (entry.get("domains") or {}).items()}
    parts |= entry.get("metrics") or {}
    value = {"deviation": (entry.get("sensitivity") or {}).get("std"), **parts}.get(part)
    return "-" if value is None else _value(entry, value)


def _published_cell(value: Mapping[str, Any] | None, places: Sequence[str]) -> str:
    """Format a published value, with its unit and the number of its footnote; "-" if there is no value.

    `places` are locations in the paper, in the order of the footnotes.
    """
    if value is None:
        return "-"
    unit, number = str(value.get("unit", "percent")), float(value["value"])
    if unit.startswith("fraction"):  # "fraction", or "fraction of 5" for a scale from 0 to 5
        unit, number = "percent", 100 * number / float(unit.partition(" of ")[2] or 1)
    shown = f"{number:.1f}" if round(number, 1) == number else f"{number:g}"
    tokens = f", {_number(value['tokens'])} tokens" if value.get("tokens") else ""
    return f"{shown}{'' if unit == 'percent' else f' {unit}'}{tokens} ({places.index(value['where']) + 1})"


def _sensitivity(comparison: Comparison) -> Table[str]:
    rows = []
    for run in comparison.runs:
        for name, entry in run.benchmarks.items():
            if (sensitivity := entry.get("sensitivity")) is not None:
                ends = sensitivity.get("interval")
                interval = "-" if ends is None else f"[{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]"
                values = {prompt: values.get("accuracy") for prompt, values in (entry.get("prompts") or {}).items()}
                shown = [f"{prompt} {_value(entry, v)}" for prompt, v in values.items() if v is not None]
                rows.append([name, run.name, f"{100 * sensitivity['std']:.2f}", interval, ", ".join(shown)])
    text = "Standard deviation of the mean over prompts, in points (Nemotron 3 Nano, appendix E); lower is better."
    return Table("Prompt sensitivity", ("benchmark", "run", "deviation", "interval", "prompts"), rows, text)


def _noise(comparison: Comparison) -> Table[str]:
    entries = entries_of(comparison.runs)
    rows = []
    for name, noise in comparison.noise.items():
        values = [_value(entries[name], value) for value in (noise.apart, noise.spread)]
        verdict = "beyond noise" if noise.apart > 2 * noise.spread else "within noise"
        rows.append([name, *values, f"{noise.ratio:.1f}", verdict])
    text = (
        "Largest difference between the runs, compared with the standard deviation of "
        f"{comparison.checkpoints} checkpoints of one training; beyond noise: more than two standard deviations. The "
        "ratio is computed from relative values (arXiv:2508.13144)."
    )
    columns = ("benchmark", "between runs", "between checkpoints", "ratio", "verdict")
    return Table("Signal and noise", columns, rows, text)


def _further(comparison: Comparison) -> Table[str]:
    rows = []
    for name in names_of(comparison.runs):
        by_run = [run.benchmarks.get(name, {}).get("metrics") or {} for run in comparison.runs]
        for metric in dict.fromkeys(key for metrics in by_run for key in metrics):
            entry = {"metric": metric}
            cells = ["-" if metric not in metrics else _value(entry, metrics[metric]) for metrics in by_run]
            if sum(map(len, by_run)) > len(by_run):
                rows.append([name, metric, *cells])
    columns = ("benchmark", "measure", *(run.name for run in comparison.runs))
    return Table("Further measures", columns, rows)


def _counted(comparison: Comparison) -> Table[str]:
    rows = []
    for name in names_of(comparison.runs):
        for run in comparison.runs:
            if (entry := run.benchmarks.get(name)) is None:
                continue
            cut = entry.get("truncated")
            keys = ("tokens", "reasoning_tokens", "n", "samples", "failed", "unscored")
            numbers = [_number(entry.get(key)) for key in keys]
            rows.append([name, run.name, *numbers[:2], "-" if cut is None else f"{cut:.1%}", *numbers[2:]])
    columns = ("benchmark", "run", "tokens", "reasoning", "cut off", "problems", "answers", "failed", "not scored")
    return Table("Answers", columns, rows)


def _excluded(comparison: Comparison) -> Table[str]:
    rows = [
        [pair.benchmark, f"{pair.a}, {pair.b}", pair.note]
        for pairs in (*comparison.pairs.values(), *comparison.modes.values())
        for pair in pairs
        if pair.note
    ]
    for run in comparison.runs:
        rows += [[name, run.name, f"not evaluated: {why}"] for name, why in (run.results.get("missing") or {}).items()]
    text = "Differences are over the problems that both runs have with identical requests and settings."
    return Table("Excluded", ("benchmark", "runs", "why"), rows, text)


def page(comparison: Comparison, points: Mapping[str, Sequence[Point]]) -> Report:
    """Create the contents of compare.md."""
    runs = [[run.name, str(run.results.get("model") or "-"), str(run.folder)] for run in comparison.runs]
    report = Report(f"Comparison with {comparison.runs[0].name}").table("", ("run", "model", "folder"), runs)
    plot_accuracies(report, comparison.runs)
    plot_frontiers(report, points, comparison.papers)
    report.add(*(table.markdown() for table in tables(comparison)))
    return report.add(
        f"Intervals cover {comparison.level:.1%}; problems are resampled, not samples. p is two-sided and paired: "
        "McNemar's exact test for one right or wrong answer per problem, otherwise a permutation test with random "
        "signs by problem. `adjusted p` is corrected for all benchmarks of its table (Holm); `better` and `worse` mean "
        f"a value below {1 - comparison.level:.2g}. `No difference shown` does not mean that there is none. `kept` is "
        "after divided by before."
    )


def show(comparison: Comparison, output: Path) -> None:
    """Print the tables to the terminal, followed by the path of compare.md in the folder `output`."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 400  # no wrapping in a file or a pipe
    for table in tables(comparison):
        if table.title in _NOT_PRINTED:
            continue
        printed = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for number, column in enumerate(table.heading):
            printed.add_column(column, overflow="fold", justify="left" if number == 0 else "right")
        for row in table.rows:
            style = {"better": "green", "worse": "red"}.get(row[-1])
            printed.add_row(*row, style=style)
        console.print(printed)
        console.print(f"{table.note}\n")
    console.print(f"{output / 'compare.md'}")
