"""Units of work that any number of processes can share, and that, once finished, survive a kill of the job.

A unit's files are named after its number. Every file is renamed when complete (`job.files`), and the one that marks the
unit as done comes last. The output is thus byte-identical for any number of processes and interruptions.
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
    """Unit of work, with its 0-based number and the size of its input in bytes."""

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Units:
    """Files that units of work are stored in.

    Attributes:
        folder: folder of the files.
        mark: suffix of the file that marks a unit as done.
        digits: number of digits of a unit's number in file names.
    """

    folder: Path
    mark: str = ".json"
    digits: int = 6

    def file(self, number: int, ending: str | None = None) -> Path:
        """Path of a unit's file with the suffix `ending`; by default, of the file that marks the unit as done."""
        return self.folder / f"{number:0{self.digits}d}{self.mark if ending is None else ending}"

    def is_done(self, unit: Unit) -> bool:
        """True if a unit is done, so that all of its files exist."""
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
        """Do the units that are not done yet, in worker processes (`in_workers`).

        Args:
            do: function that writes a unit's files.
            total: total size of the units in bytes; if None, no progress is shown.
            enough: function that is called with every unit once it is done, and returns True to end the work.
        """
        done = in_workers(do, units, workers=workers, skip=self.is_done)
        with progress_of(label, total or 0, enabled=total is not None) as advance, closing(done):
            for unit, _ in done:
                advance(unit.size)
                if enough(unit):
                    return


class OutputFolder:
    """Base class for the settings of a job whose units are done by one process or divided among several (`shard`)."""

    output: str
    shard: str | None = None

    @property
    def folder(self) -> Path:
        """Output folder."""
        return Path(self.output).expanduser()

    @property
    def own(self) -> Path:
        """Folder for the job's own records."""
        return self.folder / OWN

    @property
    def record(self) -> Path:
        """File that records the settings used to produce the output."""
        return self.own / "settings.json"

    def check_same(self, made_of: Mapping[str, Any], begun: str = "was begun with other settings") -> None:
        """Raise ValueError if the output was begun with settings other than `made_of`.

        The message begins with the output folder and `begun`, followed by the differences.
        """
        check_same(noted(self.record), made_of, f"output={self.folder} {begun}", "choose another folder")

    def lock(self) -> FileLock:
        """Create a lock for the files that all processes write."""
        self.own.mkdir(parents=True, exist_ok=True)
        return FileLock(self.own / ".lock")

    def mine[Item](self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items (units) that belong to this process's shard."""
        number, count = part_of(self.shard)
        return items[number::count]

    def claim(self) -> AbstractContextManager[None]:
        """Lock out other processes with the same shard while the context is open."""
        number, count = part_of(self.shard)
        return only_run_in(self.own / f"shard_{number}_of_{count}", "shard")
