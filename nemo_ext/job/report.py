"""Layout of reports with text, tables, code and pictures, as Markdown and as one HTML file. Does not import torch."""

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote

from nemo_ext.job.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f4e8c", "#d1495b", "#2f7d5c", "#edae49", "#7a5195", "#3d8fb0", "#8a6d3b", "#666666")
"""Colours for the lines in a picture."""


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown, without a trailing line break.

    Integers get thousands separators, and None becomes an empty cell. A column whose name ends in a colon is
    right-aligned.
    """
    marks = ["--:" if name.endswith(":") else "---" for name in heading]
    lines = [[name.removesuffix(":") for name in heading], marks, *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    number = isinstance(value, Integral) and not isinstance(value, bool)
    text = "" if value is None else f"{value:,}" if number else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Table[Cell]:
    """Table in a report.

    Attributes:
        title: heading above the table; "" if there is none.
        heading: names of the columns.
        rows: rows with one cell per column.
        note: text below the table; "" if there is none.
    """

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def markdown(self, shown: Callable[[Cell], object] = lambda cell: cell) -> str:
        """Format title, table and note in Markdown; `shown` converts each cell for `markdown_table`."""
        table = markdown_table(self.heading, [[shown(cell) for cell in row] for row in self.rows])
        return "\n\n".join(filter(None, [self.title and f"## {self.title}", table, self.note]))


class Report:
    """Report that is built from top to bottom; parts that are None or "" are skipped.

    Args:
        title: title of the page; "" for sections to be appended to another report.
        parts: blocks of Markdown below the title.
    """

    def __init__(self, title: str, *parts: str | None) -> None:
        self._parts: list[str] = []
        self._pictures: dict[str, Figure] = {}
        self.add(title and f"# {title}", *parts)

    def add(self, *parts: str | None) -> Self:
        """Add Markdown, with each part as a separate block."""
        self._parts += filter(None, parts)
        return self

    def section(self, title: str, *parts: str | None, level: int = 2) -> Self:
        """Add a section, unless parts are given and all of them are empty."""
        return self.add(f"{'#' * level} {title}", *parts) if not parts or any(parts) else self

    def table(self, title: str, heading: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> Self:
        """Add a table with an optional title and note, unless it has no rows."""
        rows = list(rows)
        return self.add(Table(title, heading, rows, note).markdown() if rows else None)

    def facts(self, rows: Mapping[str, object] | Iterable[Sequence[object]]) -> Self:
        """Add a table of names and values, without headings."""
        return self.table("", ("", ""), rows.items() if isinstance(rows, Mapping) else rows)

    def code(self, text: str, language: str = "") -> Self:
        """Add a block of code."""
        return self.add(f"```{language}\n{text.rstrip()}\n```")

    def picture(
        self, caption: str, name: str, width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any
    ) -> "list[Axes]":
        """Add a picture (sizes in inches), which is written with the report, and return its axes, row by row."""
        self._pictures[name], axes = panels(width, height, rows, columns, **layout)
        self.add(f"![{caption}]({name})")
        return axes

    def markdown(self) -> str:
        """Return the whole report as Markdown."""
        return "\n\n".join(self._parts) + "\n"

    def write(self, path: Path, *, page: bool = False, after: str = "") -> Path:
        """Write the report and its pictures to one folder.

        Args:
            page: whether to also write an HTML file next to it.
            after: Markdown of an earlier report, after which this one is written.

        Returns:
            Path of the HTML file if one is written, otherwise of the Markdown file.
        """
        for name, figure in self._pictures.items():
            save_figure(figure, path.parent / name)
        write_text(path, after + "\n" * bool(after) + self.markdown())
        return write_page(path) if page else path


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: 13px; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }}
img {{ max-width: 100%; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #16181c; color: #ddd; }} th, td {{ border-color: #444; }} a {{ color: #8ab4f8; }}
  img {{ background: #fff; }}
}}
</style></head><body>
{body}</body></html>
"""


def write_page(report: Path) -> Path:
    """Convert a Markdown report to one HTML file next to it, with the PNG pictures in its folder embedded.

    Returns:
        Path of the HTML file.
    """
    from markdown_it import MarkdownIt

    text = report.read_text()
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = renderer.parse(text)
    for image in [child for token in tokens for child in token.children or () if child.type == "image"]:
        picture = report.parent / unquote(str(image.attrs["src"]))
        with suppress(OSError):
            if picture.suffix != ".png" or not picture.resolve().is_relative_to(report.parent.resolve()):
                continue
            image.attrs["src"] = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    body = renderer.renderer.render(tokens, renderer.options, {})
    title = html.escape(text.partition("\n")[0].removeprefix("# "))
    page = report.with_suffix(".html")
    write_text(page, _PAGE.format(title=title, body=body))
    return page


def new_figure(**sizes: Any) -> "Figure":
    """Create a figure with constrained layout that needs no display; `sizes` are options of matplotlib's `Figure`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**{"layout": "constrained", **sizes})
    FigureCanvasAgg(figure)
    return figure


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any
) -> tuple["Figure", list["Axes"]]:
    """Create a figure (sizes in inches) and its axes, row by row; `layout` holds options of `Figure.subplots`."""
    figure = new_figure(figsize=(width, height))
    return figure, list(figure.subplots(rows, columns, squeeze=False, **layout).flat)


def tidy(
    *axes: "Axes",
    grid: Literal["x", "y", "both"] | None = "both",
    title: str = "",
    legend: bool | Mapping[str, Any] = False,
    **labels: Any,
) -> None:
    """Label axes, hide their upper and right spines and draw a faint grid.

    Args:
        grid: axis whose grid lines are drawn; None for no grid.
        legend: whether to draw a legend, or options of matplotlib's `legend`.
        labels: options of matplotlib's `Axes.set`: xlabel, ylabel, xlim and others.
    """
    for axis in axes:
        axis.set(**labels)
        if grid is not None:
            axis.grid(axis=grid, alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if title:
            axis.set_title(title, loc="left", fontsize=11)
        if legend is not False:
            axis.legend(**{"frameon": False, "fontsize": 9, **({} if legend is True else legend)})


def outer_legend(axes: "Sequence[Axes]", place: str = "upper center", *, columns: int = 4) -> None:
    """Draw one legend outside the axes of a picture, with every label once, unless there is only one label.

    Args:
        place: side of the picture, as for matplotlib's `loc`.
        columns: maximum number of columns.
    """
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    if len(handles) > 1:
        looks: Any = {"ncols": min(columns, len(handles)), "frameon": False, "fontsize": 9}
        axes[0].figure.legend(handles.values(), handles.keys(), loc=f"outside {place}", **looks)


def error_bar(value: float, interval: Sequence[float] | None, times: float = 1.0) -> Any:
    """Lengths below and above a value, scaled by `times`, for matplotlib's `errorbar`; None without an interval."""
    return interval and [[max(0.0, times * (value - interval[0]))], [max(0.0, times * (interval[1] - value))]]


def save_figure(figure: "Figure", path: Path, *, dpi: int = 120) -> None:
    """Write a picture in the format of its suffix, then rename it, so that no reader sees a partial file."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=dpi, format=path.suffix.removeprefix("."))
    temporary.replace(path)
