"""Shards divide a stage's variants among concurrent commands, on one or several machines. Does not import torch.

Every variant is trained and scored independently. The division depends only on the variants, not on finished work.
Shards use the same run directory. Locks prevent a shard from being started twice, and shards from running together with
a command without a shard.
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
"""Stages that can be divided, as their variants are independent."""

LOCKS = ".shards"
SECONDS_TO_START = 600.0
"""Seconds that a shard waits for others that are starting; a start takes well under a second."""


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
    def parse(cls, text: str) -> "Shard":
        """Parse the value `I/N` of `puzzle.shard`.

        Raises:
            ValueError: the value is malformed, or the shard does not exist.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"puzzle.shard={text}: expected I/N, for example 0/4 for the first of four shards")
        number, count = map(int, match.groups())
        if not count:
            raise ValueError(f"puzzle.shard={text}: expected at least one shard, as in 0/1")
        if number >= count:
            raise ValueError(f"puzzle.shard={text}: expected one of the shards 0/{count} to {count - 1}/{count}")
        return cls(number, count)

    def __str__(self) -> str:
        """Format as `I/N`, as on the command line."""
        return f"{self.number}/{self.count}"

    @property
    def label(self) -> str:
        """`IofN`, as used in file names."""
        return f"{self.number}of{self.count}"

    @classmethod
    def from_label(cls, file: Path) -> "Shard":
        """Parse the label `IofN` at the end of a file's name."""
        number, _, count = file.stem.rpartition("_")[2].partition("of")
        return cls(int(number), int(count))

    def select(self, by_block: Sequence[Sequence[Variant]]) -> list[list[Variant]]:
        """Return this shard's variants of every block, in order, given all variants; some blocks may have none.

        Every variant is in exactly one shard. Variants of the same sizes take about the same time, so each kind is
        divided evenly: shards differ by at most one variant, per kind and in total.
        """
        every = (variant for each in by_block for variant in each)
        ordered = sorted(every, key=lambda v: (str(v.block), v.number, v.name))
        selected = set(ordered[self.number :: self.count])
        return [[variant for variant in each if variant in selected] for each in by_block]


@contextmanager
def only_shard_in(run_dir: Path, shard: Shard, begin: Callable[[], object]) -> Iterator[None]:
    """Lock a shard, so that neither the same shard nor a run without a shard can start in the directory.

    Args:
        begin: called first, while no other shard or run can start.

    Raises:
        ValueError: the shard or a run without a shard is already running there, or the directory cannot be written.
    """
    with ExitStack() as held:
        with only_run_in(run_dir / LOCKS, wait=SECONDS_TO_START), only_run_in(run_dir):
            lock = _lock(run_dir, shard)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(f"{run_dir}: puzzle.shard={shard} is already running; wait for it to end") from None
            held.callback(lock.release)
            begin()
        yield


def refuse_beside_shards(run_dir: Path) -> None:
    """Reject a run without a shard while shards are running; the caller holds the directory's lock (`only_run_in`).

    Raises:
        ValueError: shards are running.
    """
    running = []
    for file in (run_dir / LOCKS).glob("shard_*.lock"):
        shard = Shard.from_label(file)
        try:
            with _lock(run_dir, shard).acquire(timeout=0):
                pass
        except Timeout:
            running.append(shard)
    if running:
        names = ", ".join(map(str, sorted(running)))
        raise ValueError(f"{run_dir}: shards are running in this directory ({names}); wait for them to end")


def _lock(run_dir: Path, shard: Shard) -> FileLock:
    return FileLock(run_dir / LOCKS / f"shard_{shard.label}.lock")
