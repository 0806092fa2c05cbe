"""Retention of a run's checkpoints, set by the config section `retention`. Does not import torch at module level.

Megatron's own `save_retain_interval` only keeps the newest checkpoint and those at multiples of an interval.
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
"""Folder next to the checkpoints into which they are moved for deletion, so that a partial one is never loaded."""
KEEP = "keep"
"""Marker file in a checkpoint that is never deleted."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Retention:
    """The section `retention` of a training config, described in hydra_conf/training.yaml."""

    last: Count | None = None
    every: Count | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.last is None:
            raise ValueError(
                "retention.every has no effect without retention.last, as all checkpoints are kept: set "
                "retention.last, for example to 2"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Retention":
        """Read the settings from a composed config; without the section, all checkpoints are kept.

        Raises:
            ValueError: an unknown key, an invalid value, or a conflict with Megatron's own retention.
        """
        settings = checked(cls, config.get("retention") or {}, "retention", strict=True)
        if settings.last is not None and config["megatron"].get("save_retain_interval") is not None:
            raise ValueError("retention.last and megatron.save_retain_interval are both set: remove one of them")
        return settings


def surplus(run_dir: Path, retention: Retention, *, before: int = 0, ends: Collection[int] = ()) -> list[Path]:
    """Checkpoints that may be deleted, oldest first.

    Apart from those that `retention` keeps, these are never deleted:

    - the newest according to Megatron's tracker, and later ones, which may still be incomplete
    - two to which the guard may roll back: the newest complete one at least `before` steps older than the newest, and
      the newest complete one at least `before` steps older than the oldest of the last `retention.last`
    - links, and folders that contain a file `keep`

    Args:
        before: number of steps that the guard rolls back, `guard.before` in the config.
        ends: further steps to keep, such as the ends of phases.
    """
    newest = last_checkpoint(run_dir)
    if newest is None or retention.last is None:
        return []
    folders = {step: folder for step, folder in sorted(by_step(run_dir / CHECKPOINTS).items()) if step <= newest}
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
    old = (folder for step, folder in folders.items() if step < last[-1] and step not in stay)
    return [folder for folder in old if not folder.is_symlink() and not (folder / KEEP).exists()]


def set_aside(run_dir: Path, retention: Retention, *, before: int = 0, ends: Collection[int] = ()) -> list[int]:
    """Move checkpoints that may be deleted (`surplus`, with the same arguments) into the folder `removed`.

    Returns:
        Steps of all checkpoints in that folder, including those left by a killed process.
    """
    removed = run_dir / CHECKPOINTS / REMOVED
    for folder in surplus(run_dir, retention, before=before, ends=ends):
        removed.mkdir(exist_ok=True)
        if not (removed / folder.name).exists():  # else the rest of an earlier one of that step is deleted first
            with suppress(FileNotFoundError):  # the process of asynchronous saves may do the same
                folder.rename(removed / folder.name)
    return sorted(by_step(removed))


def keep(run_dir: Path, step: int) -> None:
    """Mark the checkpoint of a step so that it is never deleted."""
    (by_step(run_dir / CHECKPOINTS)[step] / KEEP).touch()
