"""Common parts of reports: tables in Markdown, and pictures that get their name when complete. No torch."""

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from nemo_ext.job.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f4e8c", "#d1495b", "#2f7d5c", "#edae49", "#7a5195", "#3d8fb0", "#8a6d3b", "#666666")
"""Colours of the lines of a picture."""


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Table[Cell]:
    """A table of a report.

    Attributes:
        title: heading above it.
        heading: names of the columns.
        rows: as many cells as there are columns.
        note: text below it; "" for none.
    """

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def markdown(self, shown: Callable[[Cell], str] = str) -> str:
        """Title, table and note; `shown` makes text of a cell."""
        table = markdown_table(self.heading, [[shown(cell) for cell in row] for row in self.rows])
        return "\n\n".join([f"## {self.title}", table, *([self.note] if self.note else [])])


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
    """Write a Markdown report as one HTML file beside it, with the pictures (PNG) below its folder in it.

    Returns:
        Path of the page.
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
    """A figure with constrained layout that needs no display; `sizes` are matplotlib's `figsize` and others."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**{"layout": "constrained", **sizes})
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: "Axes", *, grid: Literal["x", "y", "both"] | None = "both") -> None:
    """Takes away an axis's upper and right frame and draws a faint grid (`x`, `y`, `both` or None)."""
    if grid is not None:
        axes.grid(axis=grid, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: "Figure", path: Path, *, dpi: int = 120) -> None:
    """Writes a picture in the format of its ending, under a temporary name first, so that no reader sees half of it."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=dpi, format=path.suffix.removeprefix("."))
    temporary.replace(path)
