"""Which checkpoints of a run stay: the config's `retention`. No torch at module level.

Megatron's own `save_retain_interval` keeps the newest alone, and those of every so many steps.
"""

import itertools
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from nemo_ext.checkpoint.sound import by_step, problem_of
from nemo_ext.job.run_directory import CHECKPOINTS, last_checkpoint
from nemo_ext.job.settings import STRICT, Count, checked

REMOVED = "removed"
"""Folder, beside the checkpoints, of those that are being deleted: half of one there is taken for no checkpoint."""
KEEP = "keep"
"""File in a checkpoint that stays whatever its age."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Retention:
    """The `retention` section of a training config.

    Attributes:
        last: newest whole checkpoints that stay; None for all.
        every: the first checkpoint at or after each multiple of so many steps stays for good; None for none.
    """

    last: Count | None = None
    every: Count | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.last is None:
            raise ValueError("every without last: all stay; set retention.last too, as in 2")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Retention":
        """Settings of a composed config; the defaults, by which all stay, if it has none.

        Raises:
            ValueError: an unknown key, an invalid value, or Megatron's own retention beside it.
        """
        found = checked(cls, config.get("retention") or {}, "retention", strict=True)
        if found.last is not None and config["megatron"].get("save_retain_interval") is not None:
            raise ValueError("retention.last and megatron.save_retain_interval are both set: leave one out")
        return found


def surplus(run_dir: Path, retention: Retention, *, before: int = 0, ends: Collection[int] = ()) -> list[Path]:
    """Checkpoints that need not stay, oldest first.

    Never among them: the newest by Megatron's tracker and what is newer, which may still be written; the newest whole
    one at least `before` steps older than it, and than the last that stays, to which a guard may go back; links; and
    folders with a file `keep`.

    Args:
        run_dir: run directory.
        retention: settings.
        before: the config's `guard.before`.
        ends: further steps that stay, such as the ends of phases.
    """
    newest = last_checkpoint(run_dir)
    if newest is None or retention.last is None:
        return []
    folders = {step: each for step, each in sorted(by_step(run_dir / CHECKPOINTS).items()) if step <= newest}
    whole = cache(lambda step: problem_of(folders[step]) is None)
    last = list(itertools.islice(filter(whole, reversed(folders)), retention.last))
    if len(last) < retention.last:
        return []
    stay = {newest, *last, *ends}
    for first in (newest, last[-1]):
        stay.update(itertools.islice(filter(whole, (step for step in reversed(folders) if step <= first - before)), 1))
    if (every := retention.every) is not None:
        for number, steps in itertools.groupby(folders, key=lambda step: step // every):
            first, *others = steps
            if number:
                stay.add(next(filter(whole, (first, *others)), first) if others else first)
    old = (each for step, each in folders.items() if step < last[-1] and step not in stay)
    return [each for each in old if not each.is_symlink() and not (each / KEEP).exists()]


def set_aside(run_dir: Path, retention: Retention, *, before: int = 0, ends: Collection[int] = ()) -> list[int]:
    """Moves checkpoints that need not stay (see `surplus`) into the folder of those that are being deleted.

    Returns:
        Steps of all that is there, also of what a killed process left.
    """
    removed = run_dir / CHECKPOINTS / REMOVED
    for each in surplus(run_dir, retention, before=before, ends=ends):
        removed.mkdir(exist_ok=True)
        if not (removed / each.name).exists():  # else half of an earlier one of that step, which goes first
            with suppress(FileNotFoundError):  # a process beside asynchronous writing may do the same
                each.rename(removed / each.name)
    return sorted(by_step(removed))


def keep(run_dir: Path, step: int) -> None:
    """Marks the checkpoint of a step as one that stays."""
    (by_step(run_dir / CHECKPOINTS)[step] / KEEP).touch()
