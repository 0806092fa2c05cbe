"""Integrity check of a run's newest checkpoint, with fallback to an older one."""

import shutil
import zipfile
from pathlib import Path

from nemo_ext.checkpoint.pickles import COMMON
from nemo_ext.checkpoint.torch_dist import METADATA, TRACKER, CheckpointError, whole_files
from nemo_ext.job.files import write_text

BROKEN = ".broken"


def fall_back(checkpoints: Path) -> str | None:
    """If the newest checkpoint is corrupt, add `.broken` to its name and fall back to an older one.

    A checkpoint is complete if its metadata can be read, every file that the metadata names has its full length, and
    the common state, if stored in a separate file (Megatron before 0.19), is not truncated. Bit flips are not detected.

    Returns:
        Message that describes the problem and the fallback; None if the newest is complete or there is none.

    Raises:
        ValueError: the newest is corrupt and there is no complete older one.
    """
    tracker = checkpoints / TRACKER
    word = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if not word.isdecimal():
        return None
    newest = checkpoints / f"iter_{int(word):07d}"
    problem = problem_of(newest)
    if problem is None:
        return None
    older = sorted((folder for folder in checkpoints.glob("iter_*") if folder.name < newest.name), reverse=True)
    sound = next((folder for folder in older if not folder.name.endswith(BROKEN) and problem_of(folder) is None), None)
    if sound is None:
        raise ValueError(
            f"{problem}; there is no complete older checkpoint: restore one, or start over in another run_dir"
        )
    write_text(tracker, str(int(sound.name.removeprefix("iter_"))))
    renamed = newest.with_name(newest.name + BROKEN)
    if newest.exists() and not renamed.exists():
        newest.rename(renamed)
    return f"{problem}; resuming from {sound.name}, and the corrupt checkpoint is now {renamed.name}"


def back_to(checkpoints: Path, step: int) -> int:
    """Roll back to the newest complete checkpoint before a step, and add `.broken` to the names of later checkpoints.

    Args:
        step: step before which the checkpoint must have been saved.

    Returns:
        Step of the checkpoint; 0 if there is none, so that training starts over.
    """
    sound, tracker = newest_before(checkpoints, step), checkpoints / TRACKER
    if sound:
        write_text(tracker, str(sound))  # before newer checkpoints are renamed
    else:
        tracker.unlink(missing_ok=True)
    for number, folder in by_step(checkpoints).items():
        if number >= step:
            renamed = folder.with_name(folder.name + BROKEN)
            if renamed.exists():
                shutil.rmtree(renamed)  # of an earlier rollback
            folder.rename(renamed)
    return sound


def newest_before(checkpoints: Path, step: int) -> int:
    """Step of the newest complete checkpoint before a step; 0 if there is none."""
    folders = by_step(checkpoints).items()
    return max((number for number, folder in folders if number < step and problem_of(folder) is None), default=0)


def by_step(checkpoints: Path) -> dict[int, Path]:
    """Mapping from step to the folder of Megatron's checkpoint at that step."""
    return {int(folder.name[5:]): folder for folder in checkpoints.glob("iter_*") if folder.name[5:].isdecimal()}


def problem_of(folder: Path) -> str | None:
    """Message that describes why a checkpoint is incomplete; None if it is complete."""
    if not (folder / METADATA).is_file():
        return f"{folder} has no {METADATA}, so the checkpoint was not written completely"
    if (folder / COMMON).is_file() and not zipfile.is_zipfile(folder / COMMON):
        return f"{folder / COMMON} is truncated"
    try:
        whole_files(folder)
    except CheckpointError as error:
        return str(error)
    return None
