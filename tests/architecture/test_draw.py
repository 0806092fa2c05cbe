"""Pictures: every block is drawn to scale with its tooltip, and files are written atomically."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nemo_ext.architecture.draw import draw_blocks
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pipeline import balance, forward_flops

ArchitectureOf = Callable[..., Architecture]
SVG = "{http://www.w3.org/2000/svg}"

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


def tiles(path: Path) -> dict[str, tuple[str, float]]:
    """Tooltip and width in points of each tile of a picture, by its id."""
    found = {}
    for group in ElementTree.parse(path).iter(f"{SVG}g"):
        title, outline = group.find(f"{SVG}title"), group.find(f"{SVG}path")
        if title is not None and title.text and outline is not None:
            points = [float(x) for x in outline.attrib["d"].replace("M", "L").replace("z", "").split() if x != "L"]
            found[group.attrib["id"]] = (title.text, max(points[::2]) - min(points[::2]))
    return found


def test_the_width_of_a_drawn_block_is_its_cost(architecture_of: ArchitectureOf, tmp_path: Path) -> None:
    model = architecture_of("nemotron3_nano")
    found = tiles(draw_blocks(model, tmp_path / "nano.svg"))
    assert found.keys() == {"embedding", "head", *(f"block-{layer}" for layer in range(1, 53))}
    gap = 0.022 * 72
    costs = forward_flops(model)
    scale = [(found[f"block-{layer}"][1] + gap) / flops for layer, flops in enumerate(costs.blocks, start=1)]
    assert scale == pytest.approx([scale[0]] * 52, rel=1e-3)
    assert found["head"][1] + gap == pytest.approx(scale[0] * costs.head, rel=1e-3)


def test_tooltips_show_sizes_and_costs(architecture_of: ArchitectureOf, tmp_path: Path) -> None:
    found = tiles(draw_blocks(architecture_of("tiny_hybrid"), tmp_path / "tiny.svg"))
    text = found["block-6"][0]
    assert "block 6: *{kv=1} attention" in text
    assert "heads 4, kv 1, head_dim 8" in text
    assert "2.592 K parameters" in text


@pytest.mark.parametrize("name", ["tiny_hybrid", "olmo3_7b", "llama_nemotron_ultra_253b"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_models_of_any_length_with_and_without_stages(
    name: str, suffix: str, architecture_of: ArchitectureOf, tmp_path: Path
) -> None:
    model = architecture_of(name)
    model = model.with_pattern(balance(model, pipeline_parallel=3))
    path = draw_blocks(model, tmp_path / f"{name}.{suffix}")
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_equal_models_are_equal_files(architecture_of: ArchitectureOf, tmp_path: Path) -> None:
    one, other = (
        draw_blocks(architecture_of("tiny_hybrid"), tmp_path / name).read_bytes() for name in ("1.svg", "2.svg")
    )
    assert one == other


def test_linear_and_empty_stages_are_drawn(architecture_of: ArchitectureOf, tmp_path: Path) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "*{linear}||M-{linear}|"})
    assert {"block-1", "block-2", "block-3"} <= tiles(draw_blocks(model, tmp_path / "linear.svg")).keys()


def test_other_suffixes_are_refused(architecture_of: ArchitectureOf, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot draw '.gif' files; use one of .svg, .png, .pdf"):
        draw_blocks(architecture_of("tiny_hybrid"), tmp_path / "model.gif")
    assert not list(tmp_path.iterdir())
