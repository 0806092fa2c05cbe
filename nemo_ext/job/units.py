"""Work in units: the input alone cuts it, any number of processes do it, and finished units survive a kill.

A unit has a number, by which its files are named. Every file gets its name when it is complete (`job.files`), the
unit's mark last. So who does which unit, and how often the work is cut off, does not change a byte.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from nemo_ext.job.files import only_run_in
from nemo_ext.job.made_of import check_same, noted
from nemo_ext.job.progress import progress_of
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import part_of
from nemo_ext.job.workers import in_workers


class Unit(Protocol):
    """A piece of the work: its number from 0, and its bytes of input."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Units:
    """The files of units.

    Attributes:
        folder: folder of the files.
        mark: ending of the file that marks a unit as done.
        digits: digits of a unit's number in a file's name.
    """

    folder: Path
    mark: str = ".json"
    digits: int = 6

    def file(self, number: int, ending: str | None = None) -> Path:
        """A file of a unit; its mark without an ending."""
        return self.folder / f"{number:0{self.digits}d}{self.mark if ending is None else ending}"

    def is_done(self, unit: Unit) -> bool:
        """True if all files of a unit exist."""
        return self.file(unit.number).is_file()

    def run[U: Unit](
        self,
        do: Callable[[U], object],
        units: Iterable[U],
        *,
        workers: int,
        label: str,
        total: int | None,
        enough: Callable[[U], bool] = lambda unit: False,
    ) -> None:
        """Do the units that are not done (`in_workers`).

        Args:
            do: makes the files of a unit.
            units: the units, read as they are needed.
            workers: number of processes.
            label: name of the work in its progress.
            total: bytes of all units; None shows no progress.
            enough: called with every unit once it is done; True ends the work.
        """
        made = in_workers(do, units, workers=workers, skip=self.is_done)
        with progress_of(label, total or 0, enabled=total is not None) as advance, closing(made):
            for unit, _ in made:
                advance(unit.size)
                if enough(unit):
                    return


class OutputFolder:
    """Base of a job's settings; its output is made by one process, or by several with a share of the units each."""

    output: str
    shard: str | None = None

    @property
    def folder(self) -> Path:
        """Folder to write."""
        return Path(self.output).expanduser()

    @property
    def own(self) -> Path:
        """Folder of the job's records."""
        return self.folder / OWN

    @property
    def record(self) -> Path:
        """File of the settings that the output is made from."""
        return self.own / "settings.json"

    def check_same(self, made_of: Mapping[str, Any], begun: str = "was begun otherwise") -> None:
        """Raises ValueError if the output was begun with other settings."""
        check_same(noted(self.record), made_of, f"output={self.folder}: {begun}", "choose another folder")

    def lock(self) -> FileLock:
        """Lock on the files that all processes write."""
        self.own.mkdir(parents=True, exist_ok=True)
        return FileLock(self.own / ".lock")

    def mine[Item](self, items: Sequence[Item]) -> Sequence[Item]:
        """This process's share of units."""
        number, count = part_of(self.shard)
        return items[number::count]

    def claim(self) -> AbstractContextManager[None]:
        """Keeps a second process out of this share while open."""
        number, count = part_of(self.shard)
        return only_run_in(self.own / f"shard_{number}_of_{count}", "shard")
