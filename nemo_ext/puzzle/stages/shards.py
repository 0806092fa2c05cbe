"""Shards: the variants of one stage divided among commands that run concurrently, on as many machines. No torch.

Every variant is trained and scored independently, so any command may do it. The division depends only on the variants,
not on what is already done. Shards share the run directory: each shard keeps out a second start of itself, and shards
and commands without a shard keep each other out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from nemo_ext.job.files import only_run_in
from nemo_ext.puzzle.variants import Variant

SHARDED = ("distill", "score")
"""Stages whose variants are independent of each other."""

LOCKS = ".shards"
SECONDS_TO_START = 600.0
"""Seconds that a shard waits for others that start at the same moment; each takes well under a second."""


@dataclass(frozen=True, order=True)
class Shard:
    """One of several equal parts of a stage.

    Attributes:
        number: 0-based number of the shard.
        count: number of shards.
    """

    number: int
    count: int

    @classmethod
    def of(cls, text: str) -> "Shard":
        """Parse `puzzle.shard=I/N`.

        Raises:
            ValueError: the text has another form, or no such shard exists.
        """
        given = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if given is None:
            raise ValueError(f"puzzle.shard={text}: expected I/N, 0/4 for the first of four shards for example")
        number, count = map(int, given.groups())
        if not count:
            raise ValueError(f"puzzle.shard={text}: expected one shard at least, 0/1")
        if number >= count:
            raise ValueError(f"puzzle.shard={text}: {count} shards are numbered 0/{count} to {count - 1}/{count}")
        return cls(number, count)

    def __str__(self) -> str:
        """`I/N`, as the user writes it."""
        return f"{self.number}/{self.count}"

    @property
    def label(self) -> str:
        """`IofN`, as used in file names."""
        return f"{self.number}of{self.count}"

    @classmethod
    def of_label(cls, file: Path) -> "Shard":
        """The shard whose label ends a file's name."""
        number, _, count = file.stem.rpartition("_")[2].partition("of")
        return cls(int(number), int(count))

    def share(self, found: Sequence[Sequence[Variant]]) -> list[list[Variant]]:
        """This shard's variants of every block, in order; some blocks may have none.

        Every variant is in exactly one shard. Variants of the same sizes take about the same time, so each kind is
        dealt out evenly: shards differ by one at most, for each kind and in total.
        """
        alike = sorted((variant for each in found for variant in each), key=lambda v: (str(v.block), v.number, v.name))
        own = set(alike[self.number :: self.count])
        return [[variant for variant in each if variant in own] for each in found]


@contextmanager
def only_shard_in(run_dir: Path, shard: Shard, begin: Callable[[], object]) -> Iterator[None]:
    """Keeps the same shard and runs without a shard out of a directory while open.

    Args:
        run_dir: run directory of the compression.
        shard: this one.
        begin: called first, while no other shard and no other run can start.

    Raises:
        ValueError: the shard or a run without a shard is already running there, or the directory cannot be written.
    """
    with ExitStack() as held:
        with only_run_in(run_dir / LOCKS, wait=SECONDS_TO_START), only_run_in(run_dir):
            lock = _lock(run_dir, shard)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(f"{run_dir}: puzzle.shard={shard} is running already; wait for it") from None
            held.callback(lock.release)
            begin()
        yield


def refuse_beside_shards(run_dir: Path) -> None:
    """Stops a run without a shard if shards are running; the caller already holds the directory (`only_run_in`).

    Raises:
        ValueError: shards are running; names them.
    """
    running = []
    for file in (run_dir / LOCKS).glob("shard_*.lock"):
        shard = Shard.of_label(file)
        try:
            with _lock(run_dir, shard).acquire(timeout=0):
                pass
        except Timeout:
            running.append(shard)
    if running:
        named = ", ".join(map(str, sorted(running)))
        raise ValueError(f"{run_dir}: shards are running in this directory ({named}); wait for them")


def _lock(run_dir: Path, shard: Shard) -> FileLock:
    return FileLock(run_dir / LOCKS / f"shard_{shard.label}.lock")
