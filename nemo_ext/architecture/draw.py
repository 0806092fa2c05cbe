"""Drawing of a model: its blocks in reading order, with widths proportional to their cost.

A tile's width is the block's share of the forward FLOPs, and its colour shows the block's kind. Values that override
the model's are written into the tile where there is room, and in SVG also into a tooltip. matplotlib is imported only
when something is drawn.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from nemo_ext.architecture import cost, pattern
from nemo_ext.architecture.blocks import FLAGS, NAMES, VALUES, Block
from nemo_ext.architecture.describe import flop, number
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pipeline import BlockCosts, even_cuts
from nemo_ext.architecture.precision_plan import Plan, low_shares
from nemo_ext.architecture.widths import layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[str, str] = {
    "M": "#2f9e8f",
    "*": "#3f5fa8",
    "E": "#e2a33c",
    "-": "#c8624a",
    "G": "#7a68ae",
    "D": "#5f97c9",
    "+": "#8c9fb5",
}
"""Colour of each block kind; the colours can also be told apart with common colour vision deficiencies."""

_ENDS = "#5b6470"
_INK, _FAINT = "#22262b", "#8a929c"
_FP8, _BF16 = "#7b4fb5", "#d5d9df"
_WIDTH, _MARGIN, _TILE, _ROW = 13.0, 0.45, 0.62, 0.98
"""Lengths in inches: figure width, side margin, tile height, and distance from one row to the next."""

_SHOWN = {"*": "\N{ASTERISK OPERATOR}", "-": "\N{EN DASH}"}
"""Vertically centred characters that are drawn in place of the notation's symbols."""

_LINEAR = "replaced by a linear"
_TILES_PER_ROW = 27
_EMBEDDING = 0.3
_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Tile that stands for a block, the embedding or the output layer.

    Attributes:
        width: width in forward FLOPs per token.
        colour: colour of the tile.
        symbol: text that names the kind, such as the block's symbol.
        note: smaller text, such as the block's values that override the model's, one a line.
        tooltip: text shown on hover in SVG.
        layer: 1-based number of the block; None for the embedding and the output layer.
        light: whether the tile is drawn in a lighter colour, for attention with a window.
        hatched: whether the tile is hatched, for a block replaced by a linear map.
        broken: whether the tile is narrower than its FLOPs require, and marked as such.
        fp8: share of the parameters in FP8 or NVFP4; None without a precision plan.
    """

    width: float
    colour: str
    symbol: str
    note: str
    tooltip: str
    layer: int | None = None
    light: bool = False
    hatched: bool = False
    broken: bool = False
    fp8: float | None = None


def draw_blocks(
    architecture: Architecture, path: str | Path, *, seq_length: int | None = None, plan: Plan | None = None
) -> Path:
    """Draw the model to a file.

    Args:
        architecture: The model; pipeline cuts in its pattern are drawn, with each stage's share.
        path: File to write (.svg, .png or .pdf), first under a temporary name.
        seq_length: Sequence length for the FLOPs; the model's own by default.
        plan: Precision plan, drawn as a bar below each block, coloured up to its share in FP8 or NVFP4.

    Returns:
        Path of the file.

    Raises:
        ValueError: The suffix is not supported, or a block kind has no cost model.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: cannot draw {path.suffix!r} files; use one of {', '.join(_SUFFIXES)}")
    length = architecture.sequence_length(seq_length)
    tiles = list(_tiles(architecture, length))
    if plan is not None:
        shares = low_shares(plan, architecture)
        tiles = [
            tile
            if tile.symbol == "embedding"
            else replace(tile, fp8=shares.get(tile.layer - 1 if tile.layer else None))
            for tile in tiles
        ]
    figure = _figure(architecture, tiles, length)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _save(figure, temporary, path.suffix[1:])
        if path.suffix == ".svg":
            _add_tooltips(temporary, tiles)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _save(figure: "Figure", path: Path, suffix: str) -> None:
    import matplotlib

    # A fixed salt and no date make the files of equal models identical.
    with matplotlib.rc_context({"svg.hashsalt": "nemo_ext", "svg.fonttype": "path"}):
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(path, format=suffix, dpi=160, metadata=metadata)


def _tiles(architecture: Architecture, length: int) -> Iterator[_Tile]:
    whole = cost.forward_flops_per_token(architecture, seq_length=length)
    embedding, head = cost.embedding_parameters(architecture), cost.head_parameters(architecture)
    yield _Tile(
        width=0,
        colour=_ENDS,
        symbol="embedding",
        note="",
        tooltip=f"embedding: {number(embedding.total)} parameters, {architecture.vocab_size:,} rows",
    )
    for layer in layers(architecture):
        block, sizes = architecture.pattern.blocks[layer - 1], architecture.sizes[layer - 1]
        flops = cost.block_forward_flops_per_token(architecture, layer, seq_length=length)
        params = cost.block_parameters(architecture, layer).total
        words = [_written(name, sizes.get(name)) for name in VALUES[block.kind] if sizes.get(name)]
        yield _Tile(
            width=flops,
            colour=COLOURS[block.kind],
            symbol=block.kind,
            note=_note(block),
            tooltip=f"block {layer}: {block} {block.name}\n{', '.join(words)}\n"
            f"{number(params)} parameters, {flop(flops)} per token ({flops / whole:.1%})",
            layer=layer,
            light=block.kind == "*" and bool(sizes.get("window")),
            hatched=block.is_linear,
        )
    flops = cost.head_forward_flops_per_token(architecture)
    yield _Tile(
        width=flops,
        colour=_ENDS,
        symbol="head",
        note=f"{flops / whole:.0%}",
        tooltip=f"final norm and output layer: {number(head.total)} parameters, {flop(flops)} per token "
        f"({flops / whole:.1%})" + (", tied to the embedding" if architecture.tied_embeddings else ""),
    )


def _note(block: Block) -> str:
    if block.is_linear:
        return "linear"
    values = dict(block.values)
    return "\n".join(_written(name, values[name]) for name in VALUES[block.kind] if name in values)


def _written(name: str, value: object) -> str:
    return name if name in FLAGS else f"{name} {value or 'none'}"


def _rows(tiles: list[_Tile]) -> tuple[list[list[_Tile]], float]:
    """Arrange all tiles but the first (the embedding) in rows of similar width; return the rows and inches per FLOP."""
    *body, head = tiles[1:]
    blocks = sum(tile.width for tile in body)
    rows = max(1, -(-len(body) // _TILES_PER_ROW))
    # An output layer that dwarfs the blocks, as in tiny models, is shortened and marked as such.
    longest = max(0.5 * blocks / rows, max((tile.width for tile in body), default=0))
    if head.width > longest:
        head = replace(head, width=longest, broken=True)
    flow = [*body, head]
    cuts = even_cuts(BlockCosts(tuple(tile.width for tile in flow)), min(rows, len(flow)))
    edges = (0, *cuts, len(flow))
    placed = [flow[first:last] for first, last in pairwise(edges)]
    widest = max(sum(tile.width for tile in row) for row in placed)
    return placed, (_WIDTH - 2 * _MARGIN - _EMBEDDING) / widest


def _figure(architecture: Architecture, tiles: list[_Tile], length: int) -> "Figure":
    from matplotlib.figure import Figure

    rows, scale = _rows(tiles)
    cuts = architecture.pattern.cuts
    above, legend, stages = 1.05, 0.5, 1.3 if cuts else 0.0
    height = above + len(rows) * _ROW + legend + stages
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(0, height))
    axes.axis("off")
    _title(axes, architecture, length, height)
    for index, row in enumerate(rows):
        bottom = height - above - index * _ROW - _TILE
        if index == 0:
            _draw_tile(axes, tiles[0], _MARGIN, bottom, _EMBEDDING - 0.05)
        _draw_row(axes, row, bottom, scale, cuts)
    below = height - above - len(rows) * _ROW
    _legend(axes, architecture, length, below - 0.02, with_precision=any(tile.fp8 is not None for tile in tiles))
    if cuts:
        _draw_stages(axes, architecture, length, below - 0.45)
    return figure


def _draw_row(axes: "Axes", row: list[_Tile], bottom: float, scale: float, cuts: tuple[int, ...]) -> None:
    left, numbered = _MARGIN + _EMBEDDING, 0.0
    starts: list[tuple[float, int]] = []
    for position, tile in enumerate(row):
        width = tile.width * scale
        if tile.layer is not None:
            if cuts and (tile.layer == 1 or tile.layer - 1 in cuts):
                starts.append((left, sum(cut <= tile.layer - 1 for cut in cuts)))
            centre = left + (min(width, 0.3) if position == 0 else width) / 2
            if position == 0 or (tile.layer % 10 == 0 and centre - numbered > 0.3):
                _text(axes, centre, bottom - 0.06, str(tile.layer), size=6.5, colour=_FAINT, va="top")
                numbered = centre
        _draw_tile(axes, tile, left, bottom, width)
        left += width
    for index, (place, stage) in enumerate(starts):
        following = starts[index + 1][0] if index + 1 < len(starts) else _WIDTH
        axes.plot((place, place), (bottom - 0.05, bottom + _TILE + 0.17), color=_INK, linewidth=1.4, zorder=3)
        label = f"stage {stage}" if following - place > 0.55 else str(stage)
        _text(axes, place + 0.05, bottom + _TILE + 0.11, label, size=7, ha="left")


def _text(axes: "Axes", x: float, y: float, text: str, *, size: float, colour: str = _INK, **looks: Any) -> None:
    """Draw text, centred unless `looks` (keyword arguments of matplotlib's `text`) say otherwise."""
    axes.text(
        x, y, text, **{"size": size, "color": colour, "ha": "center", "va": "center", "linespacing": 1.05, **looks}
    )


def _title(axes: "Axes", architecture: Architecture, length: int, height: float) -> None:
    words = [f"{number(cost.total_params(architecture))} parameters"]
    if cost.parameters(architecture).inactive:
        words.append(f"{number(cost.active_params(architecture))} active")
    forward = flop(cost.forward_flops_per_token(architecture, seq_length=length))
    words += [f"{len(architecture.pattern.blocks)} blocks", f"{forward} per token forward at {length:,} tokens"]
    _text(axes, _MARGIN, height - 0.3, architecture.name, size=15, ha="left", weight="bold")
    _text(axes, _MARGIN, height - 0.6, "   ·   ".join(words), size=9.5, ha="left")
    text = pattern.format(architecture.pattern)
    if len(text) <= 64:
        place = (_WIDTH - _MARGIN, height - 0.3)
        _text(axes, *place, text, size=9, colour=_FAINT, ha="right", family="monospace")


def _draw_tile(axes: "Axes", tile: _Tile, left: float, bottom: float, width: float) -> None:
    from matplotlib.patches import Rectangle

    gap = min(0.022, 0.18 * width)
    patch = Rectangle(
        (left + gap / 2, bottom),
        width - gap,
        _TILE,
        facecolor=_lighter(tile.colour, 0.65 if tile.hatched else 0.42 if tile.light else 0),
        edgecolor=_lighter(tile.colour, 0.4) if tile.hatched else "none",
        hatch="////" if tile.hatched else None,
        linewidth=0,
    )
    patch.set_gid(_gid(tile))
    axes.add_patch(patch)
    if tile.fp8 is not None:
        for share, colour in ((1.0, _BF16), (tile.fp8, _FP8)):
            bar = ((left + gap / 2, bottom - 0.055), share * (width - gap), 0.04)
            axes.add_patch(Rectangle(*bar, facecolor=colour, linewidth=0))
    if tile.broken:
        # Two slanted lines mark a shortened tile.
        for offset in (0.78 * width, 0.78 * width + 0.06):
            ends = (left + offset, left + offset + 0.1)
            axes.plot(ends, (bottom - 0.03, bottom + _TILE + 0.03), color="white", linewidth=2)
    _write_in(axes, tile, left + width / 2 * (0.78 if tile.broken else 1), bottom + _TILE / 2, width)


def _write_in(axes: "Axes", tile: _Tile, centre: float, middle: float, width: float) -> None:
    """Write a tile's symbol, and below it the tile's note, rotated if necessary; omit what does not fit.

    Args:
        axes: axes in inches.
        tile: the tile.
        centre: horizontal position of the text's centre.
        middle: vertical position of the text's centre.
        width: width of the tile.
    """
    ink = _INK if tile.light or tile.hatched or tile.symbol == "E" else "white"
    if len(tile.symbol) > 1 and width < 0.6:
        _text(axes, centre, middle, tile.symbol, size=6.8, colour=ink, rotation=90)
        return
    # A character in 6-point type is about 0.055 inches wide, and a line 0.1 inches high.
    lines = tile.note.split("\n") if tile.note else []
    long = max(map(len, lines), default=0) * 0.055
    flat = bool(lines) and long + 0.05 <= width and len(lines) <= 3
    upright = bool(lines) and not flat and 0.105 * len(lines) + 0.03 <= width
    if upright and long > _TILE - 0.25:
        # There is no room for both. The note is written, because the colour already shows the kind.
        _text(axes, centre, middle, tile.note, size=6, colour=ink, rotation=90)
        return
    if width >= 0.1:
        shift = 0.11 if flat else 0.2 if upright else 0.0
        size = min(11.0, 70 * width) if len(tile.symbol) == 1 else 9.5
        _text(axes, centre, middle + shift, _SHOWN.get(tile.symbol, tile.symbol), size=size, colour=ink, weight="bold")
    if flat:
        _text(axes, centre, middle - 0.1, tile.note, size=6, colour=ink)
    elif upright:
        _text(axes, centre, middle - 0.08, tile.note, size=6, colour=ink, rotation=90)


def _legend(axes: "Axes", architecture: Architecture, length: int, y: float, *, with_precision: bool) -> None:
    from matplotlib.patches import Rectangle

    blocks, whole = architecture.pattern.blocks, cost.forward_flops_per_token(architecture, seq_length=length)
    entries: list[tuple[str, bool, str]] = []
    for kind in dict.fromkeys(block.kind for block in blocks):
        numbers = [n for n in layers(architecture) if blocks[n - 1].kind == kind]
        flops = sum(cost.block_forward_flops_per_token(architecture, n, seq_length=length) for n in numbers)
        text = f"{kind}  {len(numbers)} {NAMES[kind]}, {flops / whole:.0%}"
        entries.append((COLOURS[kind], False, text))
        if any(architecture.sizes[n - 1].get("window") for n in numbers):
            entries.append((COLOURS[kind], True, "windowed"))
    if any(block.is_linear for block in blocks):
        entries.append((_FAINT, True, _LINEAR))
    if with_precision:
        entries += [(_FP8, False, "FP8 or NVFP4"), (_BF16, False, "BF16 or FP32")]
    left = _MARGIN
    for colour, light, text in entries:
        face, hatch = _lighter(colour, 0.42) if light else colour, "////" if text == _LINEAR else None
        key = Rectangle((left, y), 0.17, 0.17, facecolor=face, hatch=hatch, edgecolor=colour, linewidth=0)
        axes.add_patch(key)
        _text(axes, left + 0.25, y + 0.085, text, size=9, ha="left")
        left += 0.55 + 0.078 * len(text)
    caption = "width of a tile: its share of the forward FLOPs"
    _text(axes, _WIDTH - _MARGIN, y + 0.085, caption, size=8, colour=_FAINT, ha="right")


def _draw_stages(axes: "Axes", architecture: Architecture, length: int, top: float) -> None:
    """Draw one bar per pipeline stage; the slowest stage, which limits the pipeline, is dark.

    Args:
        axes: axes in inches.
        architecture: the model, with pipeline cuts.
        length: sequence length for the FLOPs.
        top: vertical position of the drawing's upper edge.
    """
    from matplotlib.patches import Rectangle

    flops = (cost.block_forward_flops_per_token(architecture, n, seq_length=length) for n in layers(architecture))
    known = BlockCosts(tuple(flops), head=cost.head_forward_flops_per_token(architecture))
    stages = known.of_stages(architecture.pattern.cuts)
    longest, mean = max(stages), sum(stages) / len(stages)
    heading = f"{len(stages)} pipeline stages: the longest takes {longest / mean:.2f} times the mean"
    _text(axes, _MARGIN, top + 0.1, heading, size=9, ha="left")
    room = (_WIDTH - 2 * _MARGIN) / max(len(stages), 8)
    floor, tall = top - 0.72, 0.5
    for index, stage in enumerate(stages):
        left, height = _MARGIN + index * room, tall * stage / longest
        colour = _INK if stage == longest else "#b9c0c9"
        axes.add_patch(Rectangle((left, floor), room * 0.86, height, facecolor=colour, linewidth=0))
        if len(stages) <= 40:
            _text(axes, left + room * 0.43, floor + height + 0.07, f"{stage / mean:.2f}", size=7)
        _text(axes, left + room * 0.43, floor - 0.09, str(index), size=7, colour=_FAINT)


def _lighter(colour: str, share: float) -> str:
    """Mix a colour with white; `share` is the fraction of white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _gid(tile: _Tile) -> str:
    return f"block-{tile.layer}" if tile.layer else tile.symbol


def _add_tooltips(path: Path, tiles: list[_Tile]) -> None:
    """Add a <title> to each tile's SVG group, shown as a tooltip on hover; matplotlib itself cannot write one."""
    namespace = "http://www.w3.org/2000/svg"
    ElementTree.register_namespace("", namespace)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    tree = ElementTree.parse(path)
    tooltips = {_gid(tile): tile.tooltip for tile in tiles}
    for group in tree.iter(f"{{{namespace}}}g"):
        if group.get("id", "").startswith("text_"):
            group.set("pointer-events", "none")  # otherwise a label would hide its tile's tooltip
        tooltip = tooltips.get(group.get("id", ""))
        if tooltip is not None:
            title = ElementTree.Element(f"{{{namespace}}}title")
            title.text = tooltip
            group.insert(0, title)
    tree.write(path, encoding="utf-8", xml_declaration=True)
