"""Job `nemo-ext compare`: tables, pictures and files of a comparison. No torch."""

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
"""Titles of the tables that stand in the file alone."""


def run(config: Mapping[str, Any]) -> None:
    """Run the job that the composed config describes.

    Raises:
        ValueError: a setting, a run or a paper is at fault.
    """
    given = checked(CompareSettings, config)
    show(write(given), Path(given.output).expanduser())


def write(given: CompareSettings) -> Comparison:
    """Compare runs and write all files of the comparison into its folder.

    Raises:
        ValueError: a run or a paper is at fault.
    """
    output = Path(given.output).expanduser()
    found = compared(given)
    points = frontiers(found.runs, given)
    with only_run_in(output, "output"):
        for name in (ACCURACIES, FRONTIERS):
            (output / name).unlink(missing_ok=True)
        write_text(output / "compare.json", orjson.dumps(as_json(found, points), option=JSON).decode())
        page(found, points).write(output / "compare.md")
    return found


def as_json(found: Comparison, points: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    """All numbers of a comparison."""
    return {
        "level": found.level,
        "baseline": found.runs[0].name,
        "runs": {run.name: {"folder": str(run.folder), **_summary(run)} for run in found.runs},
        "pairs": {name: [pair.as_json() for pair in pairs] for name, pairs in found.pairs.items()},
        "modes": {name: [pair.as_json() for pair in pairs] for name, pairs in found.modes.items()},
        "signal_and_noise": {name: asdict(each) for name, each in found.noise.items()},
        "frontiers": {name: [asdict(point) for point in each] for name, each in points.items()},
        "published": list(found.papers),
    }


def _summary(run: Run) -> dict[str, Any]:
    """What results.json says, without the parts by domain."""
    entries = {name: {k: v for k, v in entry.items() if k != "domains"} for name, entry in run.benchmarks.items()}
    return {key: run.results.get(key) for key in ("model", "endpoint", "seed", "nemo_ext", "mean")} | {
        "benchmarks": entries
    }


def tables(found: Comparison) -> list[Table[str]]:
    """The tables of a comparison, empty ones left out."""
    all_of_them = [
        _side_by_side(found),
        *(_against(found, name) for name in found.pairs),
        _modes(found),
        *(_published(found, paper) for paper in found.papers),
        _sensitivity(found),
        _noise(found),
        _further(found),
        _counted(found),
        _left_out(found),
    ]
    return [table for table in all_of_them if table.rows]


def _side_by_side(found: Comparison) -> Table[str]:
    names = [run.name for run in found.runs]
    rows = [
        [name, str(entry.get("metric")), *(_cell(run.benchmarks.get(name)) for run in found.runs)]
        for name, entry in entries_of(found.runs).items()
    ]
    means = [run.results.get("mean") for run in found.runs]
    if any(means):
        rows.append(["grand mean", "", *(_mean_cell(mean) for mean in means)])
    text = "In percent, with the interval over problems; bits per byte as they are, where lower is better."
    return Table("Side by side", ("benchmark", "measure", *names), rows, text)


def _cell(entry: Mapping[str, Any] | None) -> str:
    """Accuracy, its interval and the share of answers that were cut off."""
    if not entry or entry.get("accuracy") is None:
        return "-"
    truncated = entry.get("truncated")
    cut = f", {truncated:.1%} cut off" if truncated else ""
    return _with_interval(entry, entry["accuracy"], entry.get("interval")) + cut


def _mean_cell(mean: Mapping[str, Any] | None) -> str:
    return "-" if not mean else f"{_with_interval({}, mean['accuracy'], mean.get('interval'))} of {mean['benchmarks']}"


def _with_interval(entry: Mapping[str, Any], value: float, interval: Sequence[float] | None, sign: str = "") -> str:
    ends = "" if interval is None else f" [{_value(entry, interval[0], sign)}, {_value(entry, interval[1], sign)}]"
    return _value(entry, value, sign) + ends


def _value(entry: Mapping[str, Any], value: float, sign: str = "") -> str:
    """A score in percent, or bits per byte."""
    return f"{value:{sign}z.3f}" if entry.get("metric") == BITS else f"{100 * value:{sign}z.1f}"


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


AGAINST = (
    *("benchmark", "before", "after", "difference", "kept", "tokens", "cut off"),
    *("p", "adjusted p", "problems", "verdict"),
)
"""Columns of a table of pairs."""


def _against(found: Comparison, name: str) -> Table[str]:
    entries = entries_of(found.runs)
    rows = [pair_row(pair, entries.get(pair.benchmark, {})) for pair in found.pairs[name]]
    kept = [
        pair.after / pair.before
        for pair in found.pairs[name]
        if pair.before and pair.after is not None and pair.apart is not None
        if not benchmark_is_low(entries[pair.benchmark])
    ]
    text = ""
    if len(kept) > 1:
        share = f"{median(kept):.1%} over {len(kept)} benchmarks"
        text = f"Median accuracy kept: {share} (Nemotron 3 Nano, section 4.3)."
    return Table(f"{name} against {found.runs[0].name}", AGAINST, rows, text)


def pair_row(pair: Pair, entry: Mapping[str, Any]) -> list[str]:
    """Cells of a pair in a table with the columns `AGAINST`."""
    apart = pair.difference
    if apart is None or pair.before is None or pair.after is None:
        return [pair.benchmark, *["-"] * 9, pair.words]
    return [
        pair.benchmark,
        _value(entry, pair.before),
        _value(entry, pair.after),
        _with_interval(entry, apart.mean, apart.interval, "+"),
        f"{pair.after / pair.before:.1%}" if pair.before and not benchmark_is_low(entry) else "-",
        " to ".join(map(_number, pair.tokens)) if any(pair.tokens) else "-",
        " to ".join("-" if cut is None else f"{cut:.1%}" for cut in pair.cut) if any(pair.cut) else "-",
        _p(apart.p),
        _p(pair.p),
        f"{apart.problems:,}",
        pair.words,
    ]


def _modes(found: Comparison) -> Table[str]:
    rows = []
    for run in found.runs:
        for pair in found.modes.get(run.name, ()):
            entry = run.benchmarks[pair.benchmark]
            rows.append([run.name, f"{pair.a} to {pair.b}", *pair_row(pair, entry)])
    text = "Each mode against the first on the same problems, such as reasoning off and on."
    return Table("Modes", ("run", "modes", *AGAINST), rows, text)


def _published(found: Comparison, paper: Mapping[str, Any]) -> Table[str]:
    models = paper["models"]
    ours = names_of(found.runs)
    theirs = list(dict.fromkeys(name for model in models.values() for name in model["values"]))
    places = list(dict.fromkeys(value["where"] for model in models.values() for value in model["values"].values()))
    rows = []
    for name in (*ours, *(each for each in theirs if each not in ours)):
        cells = [_cell(run.benchmarks.get(name)) for run in found.runs]
        rows.append([name, *cells, *(_published_cell(model["values"].get(name), places) for model in models.values())])
    text = [f"Published values: {paper.get('source', 'no source given')}."]
    text += [f"{name}: {model['about']}." for name, model in models.items() if model.get("about")]
    text += ["Where they stand:", "; ".join(f"({number}) {place}" for number, place in enumerate(places, 1)) + "."]
    columns = ("benchmark", *(run.name for run in found.runs), *models)
    return Table(f"Beside {paper['name']}", columns, rows, " ".join(text))


def _published_cell(value: Mapping[str, Any] | None, places: Sequence[str]) -> str:
    """A value, its unit and the number of its place in the paper."""
    if value is None:
        return "-"
    unit, number = str(value.get("unit", "percent")), float(value["value"])
    if unit == "fraction":
        unit, number = "percent", 100 * number
    shown = f"{number:.1f}" if round(number, 1) == number else f"{number:g}"
    tokens = f", {_number(value['tokens'])} tokens" if value.get("tokens") else ""
    return f"{shown}{'' if unit == 'percent' else f' {unit}'}{tokens} ({places.index(value['where']) + 1})"


def _sensitivity(found: Comparison) -> Table[str]:
    rows = []
    for run in found.runs:
        for name, entry in run.benchmarks.items():
            if (one := entry.get("sensitivity")) is not None:
                ends = one.get("interval")
                interval = "-" if ends is None else f"[{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]"
                values = {prompt: values.get("accuracy") for prompt, values in (entry.get("prompts") or {}).items()}
                shown = [f"{prompt} {_value(entry, v)}" for prompt, v in values.items() if v is not None]
                rows.append([name, run.name, f"{100 * one['std']:.2f}", interval, ", ".join(shown)])
    text = "Standard deviation over prompts of the mean, in points (Nemotron 3 Nano, appendix E); lower is better."
    return Table("Prompt sensitivity", ("benchmark", "run", "deviation", "interval", "prompts"), rows, text)


def _noise(found: Comparison) -> Table[str]:
    entries = entries_of(found.runs)
    rows = []
    for name, one in found.noise.items():
        values = [_value(entries[name], value) for value in (one.apart, one.spread)]
        beyond = "beyond noise" if one.apart > 2 * one.spread else "within noise"
        rows.append([name, *values, f"{one.ratio:.1f}", beyond])
    text = (
        f"Greatest difference between the runs, beside the standard deviation of {found.checkpoints} checkpoints of "
        "one training; beyond noise: more than two of them. The ratio is of relative values (arXiv:2508.13144)."
    )
    columns = ("benchmark", "between runs", "between checkpoints", "ratio", "verdict")
    return Table("Signal and noise", columns, rows, text)


def _further(found: Comparison) -> Table[str]:
    rows = []
    for name in names_of(found.runs):
        there = [run.benchmarks.get(name, {}).get("metrics") or {} for run in found.runs]
        for metric in dict.fromkeys(key for each in there for key in each):
            entry = {"metric": metric}
            cells = ["-" if metric not in each else _value(entry, each[metric]) for each in there]
            if sum(len(each) for each in there) > len(there):
                rows.append([name, metric, *cells])
    columns = ("benchmark", "measure", *(run.name for run in found.runs))
    return Table("Further measures", columns, rows)


def _counted(found: Comparison) -> Table[str]:
    rows = []
    for name in names_of(found.runs):
        for run in found.runs:
            if (entry := run.benchmarks.get(name)) is None:
                continue
            cut = entry.get("truncated")
            keys = ("tokens", "reasoning_tokens", "n", "samples", "failed", "unscored")
            numbers = [_number(entry.get(key)) for key in keys]
            rows.append([name, run.name, *numbers[:2], "-" if cut is None else f"{cut:.1%}", *numbers[2:]])
    columns = ("benchmark", "run", "tokens", "of reasoning", "cut off", "problems", "answers", "failed", "not scored")
    return Table("Answers", columns, rows)


def _left_out(found: Comparison) -> Table[str]:
    rows = [
        [pair.benchmark, f"{pair.a}, {pair.b}", pair.note]
        for pairs in (*found.pairs.values(), *found.modes.values())
        for pair in pairs
        if pair.note
    ]
    for run in found.runs:
        rows += [[name, run.name, f"not evaluated: {why}"] for name, why in (run.results.get("missing") or {}).items()]
    text = "Differences are over problems that both were asked in the same words, with the same settings."
    return Table("Left out", ("benchmark", "runs", "why"), rows, text)


def page(found: Comparison, points: Mapping[str, Sequence[Point]]) -> Report:
    """The report."""
    runs = [[run.name, str(run.results.get("model") or "-"), str(run.folder)] for run in found.runs]
    report = Report(f"Comparison with {found.runs[0].name}").table("", ("run", "model", "folder"), runs)
    plot_accuracies(report, found.runs)
    plot_frontiers(report, points, found.papers)
    report.add(*(table.markdown() for table in tables(found)))
    return report.add(
        f"Intervals cover {found.level:.1%} and are over problems, which are drawn anew, never over samples. "
        "p is two-sided and paired: McNemar's exact test for one right or wrong answer a problem, else random signs by "
        f"problem. `adjusted p` is for all benchmarks of its table (Holm); `better` and `worse` mean that it is below "
        f"{1 - found.level:.2g}. `No difference shown` does not mean that there is none. `kept` is after over "
        "before."
    )


def show(found: Comparison, output: Path) -> None:
    """Print the tables."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 400  # a file or a pipe has room
    for table in tables(found):
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
