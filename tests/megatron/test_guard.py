"""Bad steps are skipped, and stalled ranks are named."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.checkpoint import sound
from nemo_ext.job.config import compose
from nemo_ext.job.report import Report
from nemo_ext.job.run_directory import CONFIG, read_metrics
from nemo_ext.megatron import guard
from nemo_ext.megatron.guard import Event, Guard, Watch

SMALL = (
    *("data=mock", "megatron.seq_length=64", "megatron.micro_batch_size=4", "megatron.global_batch_size=8"),
    *("train.tokens=6144", "megatron.save_interval=5", "megatron.eval_interval=1000"),
    *("megatron.eval_iters=1", "megatron.num_workers=0", "launcher.nproc_per_node=2"),
)
"""Twelve steps on two ranks, with checkpoints after 5 and 10."""


def line(step: int, loss: float | None, norm: float | None = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": norm}


def checkpoints(run_dir: Path, *steps: int) -> Path:
    folder = run_dir / "checkpoints"
    for step in steps:
        (folder / f"iter_{step:07d}").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(max(steps)))
    return folder


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats checkpoints of these tests, which have no files, as complete."""
    monkeypatch.setattr(sound, "problem_of", lambda folder: None)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (line(70, None), "the loss is not finite"),
        (line(70, 2.0, None), "the gradient norm is not finite"),
        (line(70, 3.0), "a loss of 3 (limit 2.0"),
    ],
)
def test_a_step_that_goes_wrong_ends_the_process_and_is_recorded(
    tmp_path: Path, bad: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(Guard(nan=True, spike=5, before=2, after=1), tmp_path, 0)
    for step in range(1, 70):
        watch(line(step, 2.0 + 0.01 * (step % 2)))
    watch({"step": 69, "val_loss": None})

    with pytest.raises(SystemExit) as ended:
        watch(bad)

    assert ended.value.code == guard.TRIPPED
    event = guard.pending(tmp_path)
    assert event is not None and event.what.startswith(what)
    assert (event.step, event.skipped) == (70, (68, 71))
    assert f"error: guard: {event.what} at step 70" in capsys.readouterr().err


def test_the_guard_is_off_by_default_and_a_spike_needs_64_steps(tmp_path: Path) -> None:
    for each in (Guard(), Guard(spike=5)):
        watch = Watch(each, tmp_path, 0)
        for step in range(1, 60):
            watch(line(step, 2.0 + 0.01 * (step % 2)))
        watch(line(60, 50.0))
    Watch(Guard(), tmp_path, 0)(line(61, None, None))
    assert guard.events(tmp_path) == []


def test_only_losses_before_this_start_are_used(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line(step, 2.0 + 0.01 * (step % 2) if step < 70 else 90.0)) + "\n" for step in range(1, 80))
    )
    with pytest.raises(SystemExit):
        Watch(Guard(spike=5), tmp_path, 69)(line(70, 3.0))


def test_a_start_resumes_from_the_last_checkpoint_before_the_skipped_steps(tmp_path: Path, whole: None) -> None:
    folder = checkpoints(tmp_path, 5, 10, 15)
    guard._write(tmp_path, [Event(step=16, what="a spike", skipped=(15, 17), at=0.0)])

    told = guard.turn_back(tmp_path, Guard())

    assert told == "guard: a spike at step 16; resuming from step 10 and skipping the batches of steps 15 to 17"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert sorted(each.name for each in folder.glob("iter_*")) == [
        "iter_0000005",
        "iter_0000010",
        "iter_0000015.broken",
    ]
    assert guard.turn_back(tmp_path, Guard()) is None, "once"
    config = compose("train", [f"run_dir={tmp_path}", "+megatron.iterations_to_skip=[3]", "guard.nan=true"])
    flags = guard.guard_flags(config)
    assert flags["iterations_to_skip"] == [3, 15, 16, 17] and flags["rerun_mode"] == "disabled"


def test_without_an_earlier_checkpoint_training_starts_over(tmp_path: Path, whole: None) -> None:
    folder = checkpoints(tmp_path, 5)
    guard._write(tmp_path, [Event(step=5, what="a spike", skipped=(4, 5), at=0.0)])

    assert "resuming from step 0" in (guard.turn_back(tmp_path, Guard()) or "")
    assert not (folder / "latest_checkpointed_iteration.txt").exists()


def test_returns_to_one_checkpoint_are_limited(tmp_path: Path, whole: None) -> None:
    checkpoints(tmp_path, 5)
    for step in (7, 8):
        guard._write(tmp_path, [*guard.events(tmp_path), Event(step=step, what="nan", skipped=(step, step), at=0.0)])
        guard.turn_back(tmp_path, Guard(most=2))
    guard._write(tmp_path, [*guard.events(tmp_path), Event(step=9, what="nan", skipped=(9, 9), at=0.0)])

    with pytest.raises(ValueError, match=r"already returned to step 5 2 times \(for steps 7, 8, 9\)"):
        guard.turn_back(tmp_path, Guard(most=2))
    guard.add_section(report := Report("run"), tmp_path)
    assert "| 8 | nan | 8 to 8 | 5 |" in report.markdown()


def test_a_phase_has_its_own_losses(tmp_path: Path) -> None:
    watch = Watch(Guard(spike=5), tmp_path, 0, begins=(0, 80))
    for step in range(1, 200):
        watch(line(step, (2.0 if step <= 80 else 3.0) + 0.01 * (step % 2)))
    with pytest.raises(SystemExit):
        watch(line(200, 4.0))


@pytest.mark.parametrize(("given", "steps"), [(None, None), (5, [5]), ("17", [17]), ([3, "4"], [3, 4])])
def test_steps_that_the_user_skips(tmp_path: Path, given: object, steps: list[int] | None) -> None:
    config = compose("train", [f"run_dir={tmp_path}"])
    config["megatron"]["iterations_to_skip"] = given
    assert guard.guard_flags(config).get("iterations_to_skip") == steps
    config["megatron"]["iterations_to_skip"] = "many"
    with pytest.raises(ValueError, match=r"iterations_to_skip='many': expected steps"):
        guard.guard_flags(config)


def test_a_skipped_last_step_is_saved_after_megatrons_loop(tmp_path: Path) -> None:
    words = ("+megatron.iterations_to_skip=[200]", "+megatron.save_retain_interval=100")
    flags = guard.guard_flags(compose("train", [f"run_dir={tmp_path}", *words]))
    assert (flags["save_interval"], flags["save_retain_interval"]) == (51, None)


@pytest.mark.parametrize(("stop", "skipped", "ends"), [(100, [99, 100], 98), (100, [99], 100), (300, [300], 300)])
def test_a_run_that_would_end_at_a_skipped_step_ends_before_it(
    tmp_path: Path, stop: int, skipped: list[int], ends: int
) -> None:
    words = (f"run_dir={tmp_path}", f"megatron.exit_interval={stop}", f"+megatron.iterations_to_skip={skipped}")
    assert guard.guard_flags(compose("train", list(words))).get("exit_interval", stop) == ends


def test_a_run_that_would_end_before_its_first_step_is_refused(tmp_path: Path) -> None:
    words = (f"run_dir={tmp_path}", "megatron.exit_interval=2", "+megatron.iterations_to_skip=[1,2]")
    with pytest.raises(ValueError, match="exit_interval=2 ends the run before its first step"):
        guard.guard_flags(compose("train", list(words)))


def test_stacks_are_of_the_last_start(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_0.txt").write_text(
        'Thread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in f\n'
    )
    assert (guard.stood(tmp_path, 2.0) or "").startswith("no step for 2 minutes: rank 0 in f (b.py:3)")
    assert guard.stood(tmp_path, None) is None
    guard.forget_stacks(tmp_path)
    assert guard.stood(tmp_path, 2.0) is None


def test_older_broken_checkpoints_and_other_folders_are_ignored(tmp_path: Path, whole: None) -> None:
    folder = checkpoints(tmp_path, 5, 10)
    for name in ("iter_0000010.broken", "iter_0000010_kept"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    assert sound.back_to(folder, 9) == 5
    assert sorted(each.name for each in folder.iterdir() if each.is_dir()) == [
        *("iter_0000005", "iter_0000010.broken", "iter_0000010_kept")
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+guard.nam=true", "guard: unknown key .nam.: did you mean .nan."),
        ("guard.spike=-1", r"guard\.spike"),
        ("guard.minutes=0", r"guard\.minutes"),
        ("guard.nan=maybe", r"guard\.nan"),
    ],
)
def test_an_invalid_setting_is_named(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Guard.from_config(compose("train", ["run_dir=unused", word]))


def test_preset_cluster_is_for_long_runs() -> None:
    config = compose("train", ["run_dir=unused", "operation=cluster", "megatron.save_interval=50"])

    assert Guard.from_config(config) == Guard(nan=True, spike=10, minutes=25)
    assert config["megatron"]["async_save"] and config["retention"] == {"last": 2, "every": 500}


@pytest.fixture
def faulty(fork_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """`nemo-ext train` in this process, with a fault of the ranks at a step; ranks without a fault are forked."""
    from nemo_ext import launch
    from nemo_ext.job import ranks

    def run(name: str, fault: str, *words: str) -> Path:
        monkeypatch.setattr(ranks, "training_rank", lambda config: "faulty_rank")
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("FAULT", fault)
        with monkeypatch.context() as patch:
            if fault == SOUND:
                patch.setattr(launch, "_run_ranks", lambda run_dir, ranks, *_: fork_ranks(run_dir / CONFIG, ranks))
            launch.train(compose("train", [*SMALL, f"run_dir={tmp_path / name}", *words]))
        return tmp_path / name

    return run


SOUND = "none"
CLUSTER = ("operation=cluster", "guard.minutes=5")
ALONE = "launcher.nproc_per_node=1"
TENSOR = ("megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true")


@pytest.mark.parametrize(
    ("kind", "bad", "steps", "more"),
    [
        pytest.param("nan", 7, 12, (*CLUSTER, ALONE), marks=pytest.mark.deep, id="nan"),
        pytest.param("nan", 7, 12, (*CLUSTER, *TENSOR), marks=pytest.mark.deep, id="nan, tensor-parallel"),
        pytest.param("nan", 10, 10, ("guard.nan=true",), marks=pytest.mark.deep, id="the last step"),
        pytest.param("spike", 72, 78, CLUSTER, marks=pytest.mark.deep, id="spike"),
    ],
)
def test_training_skips_a_bad_batch_as_iterations_to_skip_does(
    faulty: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    kind: str,
    bad: int,
    steps: int,
    more: tuple[str, ...],
) -> None:
    tokens = f"train.tokens={512 * steps}"
    run = faulty("planted", f"{kind}:{bad}", *more, tokens)
    out = capsys.readouterr().out

    plain = (word for word in more if word not in CLUSTER)
    told = faulty("told", SOUND, *plain, tokens, f"+megatron.iterations_to_skip=[{bad}]")

    back = re.search(rf"at step {bad}; resuming from step (\d+) and skipping the batch of step {bad}\n", out)
    assert back is not None and int(back[1]) in range(0, bad, 5), "the checkpoint before may not be written yet"
    found = [each for each in read_metrics(run / "metrics.jsonl") if "loss" in each]
    expected = [each for each in read_metrics(told / "metrics.jsonl") if "loss" in each]
    assert [each["step"] for each in found] == [step for step in range(1, steps + 1) if step != bad]
    assert [(each["step"], each["loss"]) for each in found] == [(each["step"], each["loss"]) for each in expected]
    assert "## Bad steps" in (run / "report.md").read_text()
    names = {each.name for each in (run / "checkpoints").glob("iter_*")}
    assert {f"iter_{step:07d}" for step in (*range(50, steps, 50), steps)} <= names
    assert more[0] != "operation=cluster" or len(names) <= 5, (
        "operation=cluster keeps the last two, and every tenth for good"
    )


@pytest.mark.slow
def test_a_stalled_rank_is_named(faulty: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        faulty("hangs", "hang:7:1", "guard.minutes=0.1")

    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "error: no step for 0.1 minutes:" in said and "rank 1 in stand_still (faulty_rank.py:" in said
    run = faulty("hangs", SOUND, "guard.minutes=5")
    assert [each["step"] for each in read_metrics(run / "metrics.jsonl") if "loss" in each] == list(range(1, 13))
