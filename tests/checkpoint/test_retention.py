"""Checkpoints that retention keeps."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext import launch
from nemo_ext.checkpoint import retention
from nemo_ext.checkpoint.retention import KEEP, REMOVED, Retention, keep, set_aside, surplus
from nemo_ext.job.config import compose
from nemo_ext.job.run_directory import CONFIG, read_metrics

TWO = Retention(last=2)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run at step 60 with a checkpoint every ten steps, and a newer checkpoint that is still being written."""
    for step in range(10, 80, 10):
        folder = tmp_path / "checkpoints" / f"iter_{step:07d}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    (folder / ".metadata").unlink()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("60")
    monkeypatch.setattr(retention, "problem_of", lambda each: None if (each / ".metadata").exists() else "half")
    return tmp_path


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"iter_{step:07d}"


def steps(folders: list[Path]) -> list[int]:
    return [int(each.name.removeprefix("iter_")) for each in folders]


def test_the_newest_and_unfinished_checkpoints_stay(run: Path) -> None:
    assert steps(surplus(run, TWO)) == [10, 20, 30, 40]
    assert surplus(run, Retention()) == [] and surplus(run, Retention(last=6)) == []
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("40")
    assert steps(surplus(run, TWO)) == [10, 20]
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    assert surplus(run, TWO) == []


def test_only_complete_checkpoints_count_among_the_last(run: Path) -> None:
    for step in (60, 40, 20):
        (folder(run, step) / ".metadata").unlink()
    assert steps(surplus(run, TWO)) == [10, 20], "60 is the tracker's, 50 and 30 are the last whole ones"
    assert surplus(run, Retention(last=4)) == [], "there are three"


def test_one_checkpoint_per_interval_stays(run: Path) -> None:
    assert steps(surplus(run, Retention(last=2, every=20))) == [10, 30]
    assert steps(surplus(run, Retention(last=2, every=25))) == [10, 20, 40], "30 is the first after 25"
    (folder(run, 20) / ".metadata").unlink()
    assert steps(surplus(run, Retention(last=2, every=20))) == [10, 20], "30 is the first whole one"


def test_checkpoints_that_a_guard_rolls_back_to_stay(run: Path) -> None:
    # A spike at step 61 that also skips the 15 steps before it: batches from step 46 on; and one on the way from 50.
    assert steps(surplus(run, TWO, before=15)) == [10, 20]
    (folder(run, 40) / ".metadata").unlink()
    assert steps(surplus(run, TWO, before=15)) == [10, 20, 40]


def test_ends_of_phases_and_marked_or_linked_checkpoints_stay(run: Path) -> None:
    keep(run, 20)
    shutil.move(folder(run, 10), run / "elsewhere")
    folder(run, 10).symlink_to(run / "elsewhere")
    assert steps(surplus(run, TWO, ends=[30])) == [40]
    assert (folder(run, 20) / KEEP).is_file()


def test_a_checkpoint_is_invalidated_before_its_files_are_deleted(run: Path) -> None:
    assert set_aside(run, TWO) == [10, 20, 30, 40]
    assert steps(sorted((run / "checkpoints").glob("iter_*"))) == [50, 60, 70]
    left = run / "checkpoints" / REMOVED
    shutil.rmtree(left / "iter_0000010")
    (left / "iter_0000020" / ".metadata").unlink()
    folder(run, 20).mkdir()

    assert set_aside(run, TWO) == [20, 30, 40], "the remains of a killed deletion come first"
    assert folder(run, 20).is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["retention.every=5"], "retention.every has no effect without retention.last, .*: set retention.last"),
        (["retention.last=0"], "retention.last"),
        (["+retention.lats=2"], "retention: unknown key .lats.: did you mean .last."),
        (["retention.last=2", "+megatron.save_retain_interval=100"], "both set: remove one of them"),
    ],
)
def test_an_invalid_setting_is_named(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Retention.from_config(compose("train", ["run_dir=unused", *words]))


@pytest.mark.slow
def test_a_run_keeps_the_last_two_and_every_fourth(
    fork_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "_run_ranks", lambda run_dir, ranks, *_: fork_ranks(run_dir / CONFIG, ranks))
    words = (
        *("data=mock", "megatron.seq_length=64", "megatron.micro_batch_size=4", "megatron.global_batch_size=4"),
        *("train.tokens=2816", "megatron.save_interval=1", "megatron.eval_iters=1"),
        *("megatron.num_workers=0", "+megatron.iterations_to_skip=[8]", f"run_dir={tmp_path}"),
        *("retention.last=2", "retention.every=4", "megatron.eval_interval=1000"),
    )
    half = tmp_path / "checkpoints" / REMOVED / "iter_0000001"
    half.mkdir(parents=True)
    (half / "common.pt").touch()

    launch.train(compose("train", [*words, "operation=cluster", "megatron.exit_interval=8"]))

    # Step 8 is skipped, and Megatron does not check then whether to end: this start ends before it.
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line] == list(range(1, 8))
    assert steps(sorted((tmp_path / "checkpoints").glob("iter_*"))) == [4, 6, 7]
    assert os.listdir(tmp_path / "checkpoints" / REMOVED) == []

    launch.train(compose("train", list(words)))

    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "11"
    # The end of the first start, the first after step 8, and the last two.
    assert steps(sorted((tmp_path / "checkpoints").glob("iter_*"))) == [4, 7, 9, 10, 11]
    assert os.listdir(tmp_path / "checkpoints" / REMOVED) == []
