"""The report of a curation: the funnel as tables and a picture, and what left, with examples."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_ext.data.curation.funnel import Amount, Counts, Through
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy

PICTURE = "funnel.png"
_SHOWN = 160


def markdown(about: Sequence[tuple[str, str]], counts: Mapping[str, Counts], stages: Sequence[str]) -> str:
    """The report.

    Args:
        about: rows of a table about the whole.
        counts: counts of each stream.
        stages: names of the stages in order.
    """
    whole = Counts()
    for own in counts.values():
        whole.add(own)
    lines = ["# Curation", "", markdown_table(("", ""), about), "", f"![the funnel]({PICTURE})", ""]
    parts = {"All streams": whole, **counts} if len(counts) > 1 else counts
    for name, own in parts.items():
        lines += [f"## {name}", "", f"Records that became no document: {own.read.summary(examples=3)}.", ""]
        lines += [_funnel(own, stages), ""]
    lines += ["## What left", ""]
    for stage in stages:
        lines += _left(stage, whole.of(stage))
    return "\n".join(lines)


def _funnel(counts: Counts, stages: Sequence[str]) -> str:
    first = counts.of("read").kept
    tokens = bool(first.tokens)
    heading = ["stage", "documents in", "out", "of those in", "of all", "MB in", "out", "changed"]
    rows = []
    for name in stages:
        through = counts.of(name)
        row = [name, f"{through.came.documents:,}", f"{through.kept.documents:,}"]
        row += [_share(through.kept.documents, through.came.documents), _share(through.kept.documents, first.documents)]
        row += [f"{through.came.bytes / 1e6:,.2f}", f"{through.kept.bytes / 1e6:,.2f}", f"{through.changed:,}"]
        row += [f"{through.came.tokens:,}", f"{through.kept.tokens:,}"] if tokens else []
        rows.append(row)
    return markdown_table([*heading, *(["tokens in", "out"] if tokens else [])], rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _left(stage: str, through: Through) -> list[str]:
    lines = []
    for name, reason in sorted(through.dropped.items(), key=lambda item: -item[1].amount.documents):
        amount = reason.amount
        lines += [
            f"### {stage}: {name}",
            "",
            f"{_told(amount)}, {_share(amount.documents, through.came.documents)}.",
            "",
        ]
        rows = [(document, detail[:_SHOWN]) for _, document, detail in reason.examples]
        lines += [markdown_table(("document", "what was found"), rows), ""]
    return lines


def _told(amount: Amount) -> str:
    return f"{amount.documents:,} documents, {amount.bytes / 1e6:,.2f} MB"


def picture(counts: Mapping[str, Counts], stages: Sequence[str], path: Path) -> None:
    """Bars of the bytes that are left after every stage, by stream.

    Args:
        counts: counts of each stream.
        stages: names of the stages in order.
        path: picture to write.
    """
    names = ["read", *stages]
    figure = new_figure(figsize=(8, 1.2 + 0.35 * len(names)))
    axes = figure.subplots()
    left = [0.0] * len(names)
    for stream, own in counts.items():
        values = [own.of(name).kept.bytes / 1e6 for name in names]
        axes.barh(names, values, left=left, label=stream, height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    whole = max(left[0], 1e-12)
    for place, value in enumerate(left):
        axes.text(value, place, f" {value / whole:.0%}", va="center", fontsize=8)
    axes.set_xlim(0, whole * 1.1)
    axes.invert_yaxis()
    axes.set_xlabel("MB of text that is left after each stage")
    if len(counts) > 1:
        figure.legend(loc="outside upper center", ncols=min(4, len(counts)))
    tidy(axes, grid="x")
    save_figure(figure, path)
