"""Dependency matrix: compared with removing blocks by hand, and resumed from an existing file."""

import json
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from nemo_ext.architecture.pattern import parse
from nemo_ext.blockwise.parent import Parent
from nemo_ext.job.config import compose
from nemo_ext.megatron.session import build_model
from nemo_ext.puzzle.fusion import dependency
from nemo_ext.puzzle.fusion.dependency import (
    checksum,
    cosine_distance,
    distance_sums,
    draw_dependency,
    measure_dependency,
)
from nemo_ext.puzzle.fusion.fusion import Group


@pytest.fixture
def parent(megatron: None) -> Callable[..., Parent]:
    def make(model: str = "llama_nemotron_tiny", pattern: str = "*---*-") -> Parent:
        overrides = ["run_dir=unused", "data=mock", f"model={model}", "precision=fp32", f'model.pattern="{pattern}"']
        torch.manual_seed(0)
        made = Parent(*build_model(compose("train", overrides)))
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)  # untrained blocks contribute almost nothing
        return made

    return make


def calibration(batches: int = 2, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 384, (2, 12), generator=generator) for _ in range(batches)]


def by_hand(parent: Parent, tokens: torch.Tensor) -> list[list[float]]:
    """Pass of the whole model without block i, for every i, with cosines in fp64."""

    def contributions(without: int | None) -> list[torch.Tensor]:
        with torch.no_grad(), parent.recorded() as record:
            parent.logits(tokens, {} if without is None else {without: None})
        added = [output.double() - hidden.double() for hidden, output in record]
        if without is not None:
            added.insert(without, torch.zeros_like(added[0]))
        return added

    whole = contributions(None)
    count = len(parent.layers)
    matrix = [[nan] * count for _ in range(count)]
    for i in range(count):
        changed = contributions(i)
        for j in range(i + 1, count):
            matrix[i][j] = (1 - cosine_similarity(whole[j], changed[j], dim=-1)).mean().item()
    return matrix


@pytest.mark.parametrize(
    ("model", "pattern"),
    [("llama_nemotron_tiny", "*---*-"), ("nemotron3_nano_tiny", "M*-E-"), ("domyn_small_tiny", "*--{linear}-")],
)
def test_rows_match_removing_a_block_by_hand(
    model: str, pattern: str, parent: Callable[..., Parent], tmp_path: Path
) -> None:
    opened, data = parent(model, pattern), calibration()
    with torch.no_grad():
        before = opened.logits(data[0])

    matrix = measure_dependency(opened, data, tmp_path / "dependency.jsonl")

    expected = by_hand(opened, torch.cat(data))
    assert max(max(distance for distance in row if not isnan(distance)) for row in matrix[:-1]) > 0.01
    for found, row in zip(matrix, expected, strict=True):
        assert found == pytest.approx(row, rel=1e-4, abs=1e-6, nan_ok=True)
    with torch.no_grad():
        assert torch.equal(opened.logits(data[0]), before)  # no block remained removed


def test_rows_in_the_file_are_not_measured_again(
    parent: Callable[..., Parent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, data, file = parent(), calibration(), tmp_path / "dependency.jsonl"
    whole = measure_dependency(opened, data, tmp_path / "whole.jsonl")
    measured: list[list[int]] = []

    def spy(parent: Parent, left_out: Any, *args: Any, **kwargs: Any) -> Any:
        measured.append(list(left_out))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return distance_sums(parent, left_out, *args, **kwargs)

    monkeypatch.setattr(dependency, "distance_sums", spy)
    monkeypatch.setattr(dependency, "TOGETHER", 2)
    with pytest.raises(KeyboardInterrupt):
        measure_dependency(opened, data, file)
    passes: list[int] = []
    monkeypatch.setattr(dependency, "TOGETHER", 9)
    matrix = measure_dependency(opened, data, file, advance=passes.append)

    assert measured == [[0, 1], [2, 3], [2, 3, 4]]
    assert passes[0] == 2 * len(data) and sum(passes) == 5 * len(data)
    assert len(file.read_text().splitlines()) == 5
    for found, row in zip(matrix, whole, strict=True):
        assert found == pytest.approx(row, nan_ok=True)


def test_parts_of_the_calibration_set_add_up(parent: Callable[..., Parent]) -> None:
    opened, data, left_out = parent(), calibration(3), [0, 2]

    whole = distance_sums(opened, left_out, data)
    shares = [distance_sums(opened, left_out, share) for share in (data[:1], data[1:])]

    for number in left_out:
        assert sum(sums[number] for sums in shares).tolist() == pytest.approx(whole[number].tolist())
    assert sum(map(checksum, (data[:1], data[1:]))) % 2**32 == checksum(data) == checksum([torch.cat(data)])
    assert checksum(data) != checksum(calibration(3, seed=6))


@pytest.mark.slow
def test_ranks_with_parts_of_the_calibration_set_write_the_same_as_one(
    parent: Callable[..., Parent], on_ranks: Callable[..., None], tmp_path: Path
) -> None:
    opened, data = parent(pattern="*--"), calibration(3)
    overrides = ["run_dir=unused", "data=mock", "model=llama_nemotron_tiny", "precision=fp32", 'model.pattern="*--"']
    torch.save(data, tmp_path / "calibration.pt")
    torch.save(dict(opened.model.named_parameters()), tmp_path / "weights.pt")
    (tmp_path / "overrides.json").write_text(json.dumps(overrides))

    on_ranks(Path(__file__).with_name("dependency_rank.py"), tmp_path)

    whole = measure_dependency(opened, data, tmp_path / "whole.jsonl")
    for rank in range(2):
        for found, row in zip(torch.load(tmp_path / f"matrix{rank}.pt"), whole, strict=True):
            assert found == pytest.approx(row, rel=1e-5, nan_ok=True)
    # The ranks' file is of the whole calibration set: nothing is measured again.
    lines = (tmp_path / "dependency.jsonl").read_text()
    measure_dependency(opened, data, tmp_path / "dependency.jsonl")
    assert (tmp_path / "dependency.jsonl").read_text() == lines


def test_a_file_of_another_model_or_data_is_refused(parent: Callable[..., Parent], tmp_path: Path) -> None:
    opened, data, file = parent(pattern="*--"), calibration(), tmp_path / "dependency.jsonl"
    measure_dependency(opened, data, file)

    with pytest.raises(ValueError, match=r"48 tokens .* this run has 3 blocks and 24 tokens"):
        measure_dependency(opened, data[:1], file)
    with pytest.raises(ValueError, match="remove the file"):
        measure_dependency(opened, calibration(seed=6), file)
    with pytest.raises(ValueError, match=r"measured with 3 blocks .* this run has 4 blocks"):
        measure_dependency(parent(pattern="*--*"), data, file)
    file.write_text(file.read_text() + '{"block": 3}\n')
    with pytest.raises(ValueError, match=r"dependency\.jsonl:3: expected a row"):
        measure_dependency(opened, data, file)


def test_an_empty_calibration_set_is_refused(parent: Callable[..., Parent], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="calibration set is empty"):
        measure_dependency(parent(pattern="*--"), [], tmp_path / "dependency.jsonl")


def test_small_distances_keep_their_digits() -> None:
    first = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    second = first + 1e-5 * torch.randn(4, 64, generator=torch.Generator().manual_seed(1))

    exact = 1 - cosine_similarity(first.double(), second.double(), dim=-1)
    assert cosine_distance(first, second).tolist() == pytest.approx(exact.tolist(), rel=1e-2)
    assert cosine_distance(first, -first).tolist() == pytest.approx([2.0] * 4)
    assert cosine_distance(first, first).eq(0).all()
    assert cosine_distance(first * 0, first * 0).eq(0).all()


def test_a_picture_of_a_large_model(tmp_path: Path) -> None:
    pattern = parse("*-" * 40 + "-" * 46)
    matrix = [[1 / (j - i) if j > i else nan for j in range(126)] for i in range(126)]

    path = draw_dependency(matrix, tmp_path / "d.png", pattern=pattern, groups=[Group(80, 99)], title="126")

    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["d.png"]


def test_a_picture_names_blocks_and_outlines_fused_ones(tmp_path: Path) -> None:
    matrix = [[0.25 if j > i else nan for j in range(6)] for i in range(6)]

    path = draw_dependency(matrix, tmp_path / "d.svg", pattern=parse("*-----"), groups=[Group(2, 3)])

    text = path.read_text()
    assert all(f"<!-- {number} \N{EN DASH} -->" in text for number in range(2, 7))
    assert "<!-- fused -->" in text and "attention" in text


def test_a_picture_of_one_block_and_of_another_model(tmp_path: Path) -> None:
    assert draw_dependency([[nan]], tmp_path / "d.png", pattern=parse("-")).is_file()
    with pytest.raises(ValueError, match="2 rows, but the model has 3 blocks"):
        draw_dependency([[nan] * 2] * 2, tmp_path / "d.png", pattern=parse("---"))
