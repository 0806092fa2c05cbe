"""Common parts of reports: tables in Markdown, and pictures that get their name when complete. No torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


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
