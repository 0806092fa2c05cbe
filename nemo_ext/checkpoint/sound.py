"""Check that a run's newest checkpoint is whole, and fall back to an older one if it is not."""

import shutil
import zipfile
from pathlib import Path

from nemo_ext.checkpoint.pickles import COMMON
from nemo_ext.checkpoint.torch_dist import METADATA, TRACKER, CheckpointError, whole_files
from nemo_ext.job.files import write_text

BROKEN = ".broken"


def fall_back(checkpoints: Path) -> str | None:
    """Makes an older checkpoint the newest if the newest is broken, and renames the broken one to `.broken`.

    Whole means: the metadata can be read, every file that it names is there in full length, and the common state, where
    it has a file of its own (Megatron before 0.19), is not cut short. A flipped bit inside a file is not noticed.

    Args:
        checkpoints: the folder with Megatron's tracker file.

    Returns:
        Message on what was wrong and what was done; None if nothing was.

    Raises:
        ValueError: the newest is broken and there is no other.
    """
    tracker = checkpoints / TRACKER
    word = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if not word.isdecimal():
        return None
    newest = checkpoints / f"iter_{int(word):07d}"
    problem = problem_of(newest)
    if problem is None:
        return None
    before = sorted((each for each in checkpoints.glob("iter_*") if each.name < newest.name), reverse=True)
    sound = next((each for each in before if not each.name.endswith(BROKEN) and problem_of(each) is None), None)
    if sound is None:
        raise ValueError(f"{problem}; there is no other checkpoint: restore it, or begin again in another run_dir")
    write_text(tracker, str(int(sound.name.removeprefix("iter_"))))
    kept = newest.with_name(newest.name + BROKEN)
    if newest.exists() and not kept.exists():
        newest.rename(kept)
    return f"{problem}: going on from {sound.name}; the broken one is {kept.name}"


def back_to(checkpoints: Path, step: int) -> int:
    """Makes the newest whole checkpoint before a step the newest; renames later ones to `.broken`.

    Args:
        checkpoints: the folder with Megatron's tracker file.
        step: the first step that the checkpoint must not have.

    Returns:
        Its step; 0 if there is none, and training begins anew.
    """
    sound, tracker = newest_before(checkpoints, step), checkpoints / TRACKER
    if sound:
        write_text(tracker, str(sound))  # before what is newer goes
    else:
        tracker.unlink(missing_ok=True)
    for number, each in by_step(checkpoints).items():
        if number >= step:
            kept = each.with_name(each.name + BROKEN)
            if kept.exists():
                shutil.rmtree(kept)  # of an earlier time
            each.rename(kept)
    return sound


def newest_before(checkpoints: Path, step: int) -> int:
    """Step of the newest whole checkpoint before a step; 0 if there is none."""
    found = by_step(checkpoints).items()
    return max((number for number, each in found if number < step and problem_of(each) is None), default=0)


def by_step(checkpoints: Path) -> dict[int, Path]:
    """Folders of Megatron's checkpoints by step."""
    return {int(each.name[5:]): each for each in checkpoints.glob("iter_*") if each.name[5:].isdecimal()}


def problem_of(folder: Path) -> str | None:
    """Problem of a checkpoint, as a message; None if it is whole."""
    if not (folder / METADATA).is_file():
        return f"{folder}: no {METADATA}, so it was not written to its end"
    if (folder / COMMON).is_file() and not zipfile.is_zipfile(folder / COMMON):
        return f"{folder / COMMON}: cut short"
    try:
        whole_files(folder)
    except CheckpointError as error:
        return str(error)
    return None
