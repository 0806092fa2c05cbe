"""The report of a curation: the funnel as tables and a picture, and what left, with examples."""

from collections.abc import Mapping, Sequence

from nemo_ext.data.curation.funnel import Counts, Through
from nemo_ext.job.report import Report, outer_legend, tidy

PICTURE = "funnel.png"
_SHOWN = 160


def page(about: Mapping[str, object], counts: Mapping[str, Counts], stages: Sequence[str]) -> Report:
    """The report: rows about the whole, the funnel of each stream, what left at each stage."""
    whole = Counts()
    for own in counts.values():
        whole.add(own)
    report = Report("Curation").facts(about)
    _picture(report, counts, stages)
    for name, own in {"All streams": whole, **counts}.items() if len(counts) > 1 else counts.items():
        report.section(name, f"Records that became no document: {own.read.summary(examples=3)}.")
        _funnel(report, own, stages)
    report.section("What left")
    for stage in stages:
        _left(report, stage, whole.of(stage))
    return report


def _funnel(report: Report, counts: Counts, stages: Sequence[str]) -> None:
    first = counts.of("read").kept
    heading = ["stage", "documents in", "out", "of those in", "of all", "MB in", "out", "changed"]
    rows = []
    for name in stages:
        through = counts.of(name)
        came, kept = through.came, through.kept
        row = [name, came.documents, kept.documents, _share(kept.documents, came.documents)]
        row += [_share(kept.documents, first.documents), f"{came.bytes / 1e6:,.2f}", f"{kept.bytes / 1e6:,.2f}"]
        rows.append([*row, through.changed, *((came.tokens, kept.tokens) if first.tokens else ())])
    report.table("", [*heading, *(("tokens in", "out") if first.tokens else ())], rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _left(report: Report, stage: str, through: Through) -> None:
    for name, reason in sorted(through.dropped.items(), key=lambda item: -item[1].amount.documents):
        left, share = reason.amount, _share(reason.amount.documents, through.came.documents)
        report.section(
            f"{stage}: {name}", f"{left.documents:,} documents, {left.bytes / 1e6:,.2f} MB, {share}.", level=3
        )
        rows = [(document, detail[:_SHOWN]) for _, document, detail in reason.examples]
        report.table("", ("document", "what was found"), rows)


def _picture(report: Report, counts: Mapping[str, Counts], stages: Sequence[str]) -> None:
    """Draws bars of the bytes that are left after every stage, by stream."""
    names = ["read", *stages]
    (axes,) = report.picture("the funnel", PICTURE, 8, 1.2 + 0.35 * len(names))
    left = [0.0] * len(names)
    for stream, own in counts.items():
        values = [own.of(name).kept.bytes / 1e6 for name in names]
        bars = axes.barh(names, values, left=left, label=stream, height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    whole = max(left[0], 1e-12)
    axes.bar_label(bars, [f"{value / whole:.0%}" for value in left], padding=3, fontsize=8)
    axes.invert_yaxis()
    tidy(axes, grid="x", xlabel="MB of text that is left after each stage", xlim=(0, whole * 1.1))
    outer_legend([axes])
