"""Report on a curation: the funnel as tables and a picture, and dropped documents with examples."""

from collections.abc import Mapping, Sequence

from nemo_ext.data.curation.funnel import Counts, Through
from nemo_ext.job.report import Report, outer_legend, tidy

PICTURE = "funnel.png"
_SHOWN = 160


def page(about: Mapping[str, object], counts: Mapping[str, Counts], stages: Sequence[str]) -> Report:
    """Build the report: facts about the run, the funnel of each stream, and the documents dropped by each stage."""
    whole = Counts()
    for stream_counts in counts.values():
        whole.add(stream_counts)
    report = Report("Curation").facts(about)
    _picture(report, counts, stages)
    for name, shown in {"All streams": whole, **counts}.items() if len(counts) > 1 else counts.items():
        report.section(name, f"Skipped records: {shown.read.summary(examples=3)}.")
        _funnel(report, shown, stages)
    report.section("Dropped documents")
    for stage in stages:
        _dropped(report, stage, whole.stage(stage))
    return report


def _funnel(report: Report, counts: Counts, stages: Sequence[str]) -> None:
    first = counts.stage("read").kept
    heading = ["stage", "documents in", "out", "of those in", "of all", "MB in", "out", "changed"]
    rows = []
    for name in stages:
        through = counts.stage(name)
        came, kept = through.came, through.kept
        row = [name, came.documents, kept.documents, _share(kept.documents, came.documents)]
        row += [_share(kept.documents, first.documents), f"{came.bytes / 1e6:,.2f}", f"{kept.bytes / 1e6:,.2f}"]
        rows.append([*row, through.changed, *((came.tokens, kept.tokens) if first.tokens else ())])
    report.table("", [*heading, *(("tokens in", "out") if first.tokens else ())], rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _dropped(report: Report, stage: str, through: Through) -> None:
    for name, reason in sorted(through.dropped.items(), key=lambda item: -item[1].amount.documents):
        amount, share = reason.amount, _share(reason.amount.documents, through.came.documents)
        report.section(
            f"{stage}: {name}", f"{amount.documents:,} documents, {amount.bytes / 1e6:,.2f} MB, {share}.", level=3
        )
        rows = [(document, detail[:_SHOWN]) for _, document, detail in reason.examples]
        report.table("", ("document", "detail"), rows)


def _picture(report: Report, counts: Mapping[str, Counts], stages: Sequence[str]) -> None:
    """Draw stacked bars of the bytes kept by each stage, one colour per stream."""
    names = ["read", *stages]
    (axes,) = report.picture("the funnel", PICTURE, 8, 1.2 + 0.35 * len(names))
    ends = [0.0] * len(names)
    for stream, stream_counts in counts.items():
        values = [stream_counts.stage(name).kept.bytes / 1e6 for name in names]
        bars = axes.barh(names, values, left=ends, label=stream, height=0.7)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    whole = max(ends[0], 1e-12)
    axes.bar_label(bars, [f"{end / whole:.0%}" for end in ends], padding=3, fontsize=8)
    axes.invert_yaxis()
    tidy(axes, grid="x", xlabel="MB of text kept by each stage", xlim=(0, whole * 1.1))
    outer_legend([axes])
