import shutil
from pathlib import Path

import pytest
import torch

from nemo_ext.checkpoint.sound import fall_back
from nemo_ext.checkpoint.torch_dist import TRACKER, TorchDistReader


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Checkpoints of the steps 10, 20 and 30; the last is the newest."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    for step in (10, 20, 30):
        folder = tmp_path / f"iter_{step:07d}"
        save({"w": torch.full((64,), float(step))}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (tmp_path / TRACKER).write_text("30")
    return tmp_path


def cut(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-10])


def test_a_complete_checkpoint_is_not_changed(checkpoints: Path) -> None:
    assert fall_back(checkpoints) is None
    assert (checkpoints / TRACKER).read_text() == "30"


@pytest.mark.parametrize("damage", ["cut", "missing", "metadata", "gone"])
def test_the_checkpoint_before_a_broken_one_is_used(checkpoints: Path, damage: str) -> None:
    newest = checkpoints / "iter_0000030"
    if damage == "cut":
        cut(newest)
    elif damage == "missing":
        next(newest.glob("*.distcp")).unlink()
    elif damage == "metadata":
        (newest / ".metadata").write_bytes(b"\x80")
    else:
        shutil.rmtree(newest)
    cut(checkpoints / "iter_0000020")

    said = fall_back(checkpoints)

    assert said is not None and "resuming from iter_0000010" in said
    assert (checkpoints / TRACKER).read_text() == "10"
    assert (checkpoints / "iter_0000030.broken").is_dir() == (damage != "gone")
    assert TorchDistReader(checkpoints / "iter_0000010").tensors
    assert fall_back(checkpoints) is None


def test_a_run_without_a_complete_checkpoint_ends(checkpoints: Path) -> None:
    for folder in checkpoints.glob("iter_*"):
        cut(folder)

    with pytest.raises(ValueError, match="there is no complete older checkpoint"):
        fall_back(checkpoints)
    assert (checkpoints / TRACKER).read_text() == "30", "nothing is changed then"


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert fall_back(tmp_path) is None
