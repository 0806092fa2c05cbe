"""Units are done once by any number of processes; each process has a share; other settings are refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import note
from nemo_ext.job.units import OutputFolder, Units


@dataclass(frozen=True)
class Piece:
    number: int
    size: int = 1


@dataclass(frozen=True)
class Settings(OutputFolder):
    output: str
    shard: str | None = None


def make(units: Units, piece: Piece) -> None:
    assert not units.is_done(piece)
    write_text(units.file(piece.number, ".txt"), str(piece.number))
    write_text(units.file(piece.number), "")


def run(units: Units, pieces: Sequence[Piece], enough: Callable[[Piece], bool] = lambda piece: False) -> None:
    units.run(partial(make, units), pieces, workers=1, label="pieces", total=None, enough=enough)


def test_units_are_done_once_and_named_by_their_numbers(tmp_path: Path) -> None:
    units, pieces, seen = Units(tmp_path, digits=2), [Piece(number) for number in range(5)], list[int]()
    make(units, pieces[3])

    def enough(piece: Piece) -> bool:
        seen.append(piece.number)
        return piece.number == 3

    run(units, pieces, enough)
    assert seen == [0, 1, 2, 3] and sorted(path.name for path in tmp_path.glob("*.txt")) == [
        f"0{number}.txt" for number in range(4)
    ]
    run(units, pieces)
    assert all(map(units.is_done, pieces))


def test_every_unit_is_in_one_share_and_a_share_is_claimed_once(tmp_path: Path) -> None:
    parts = [Settings(str(tmp_path), f"{number}/3") for number in range(3)]
    assert sorted(item for part in parts for item in part.mine(range(8))) == list(range(8))
    assert Settings(str(tmp_path)).mine(range(8)) == range(8)
    refused = pytest.raises(ValueError, match="another run is using this directory")
    with parts[0].claim(), parts[1].claim(), refused, parts[0].claim():
        pass
    with parts[0].claim(), parts[0].lock():
        pass


def test_other_settings_are_refused_with_the_ones_that_differ(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path))
    settings.check_same({"a": {"b": 1}})  # nothing was started
    note(settings.record, {"a": {"b": 1}, "c": None})
    settings.check_same({"a": {"b": 1}})
    said = r'^output=.* was begun with other settings \(a\.b: 1 -> 2; d: null -> "x"\); choose another folder$'
    with pytest.raises(ValueError, match=said):
        settings.check_same({"a": {"b": 2}, "d": "x"})
