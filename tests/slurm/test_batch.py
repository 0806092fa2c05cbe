"""slurm/train.sbatch on a real Slurm: interrupted runs are resumed. Except in one test, ranks are simulated."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext.job.run_directory import last_checkpoint, read_metrics
from nemo_ext.slurm import attempts

REPOSITORY = Path(__file__).parents[2]
STEPS = 40
WORDS = (
    *("recipe=nemotron3_nano/quickstart", "data=mock", "megatron.seq_length=64", "megatron.micro_batch_size=1"),
    *("megatron.global_batch_size=2", f"train.tokens={STEPS * 128}"),
    *("megatron.eval_iters=1", "megatron.eval_interval=1000", "memory_profile=null"),
)
pytestmark = [pytest.mark.slow, pytest.mark.slurm]


@pytest.fixture
def submit(slurm: Any, nemo_ext: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """sbatch with a script and words, as called by hand; returns the job's id."""

    def submitted(*words: str, nodes: int = 2, job: str = "train") -> str:
        options = (f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1", "--parsable")
        place = (
            f"--chdir={tmp_path}",
            f"--output={tmp_path}/slurm-%j.out",
            f"--export=ALL,NEMO_EXT_PYTHON={sys.executable}",
        )
        script = REPOSITORY / "slurm" / f"{job}.sbatch"
        theirs = [word for word in words if word.startswith("--")]
        ours = [word for word in words if not word.startswith("--")]
        return slurm.call("sbatch", *options, *place, *theirs, str(script), "cluster=testbed", *ours).strip()

    return submitted


def steps(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line}


def losses(rank: Any, count: int = STEPS) -> dict[int, float]:
    """Metrics of uninterrupted ranks."""
    found, state = {}, rank.START
    for step in range(1, count + 1):
        state = rank.following(state)
        found[step] = rank.loss_of(state)
    return found


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("slurm-*.out"))


def test_a_time_limit_is_a_pause(
    slurm: Any, submit: Callable[..., str], tmp_path: Path, standin: Callable[..., None], standins: Any
) -> None:
    standin(holds_at="7")
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}")
    slurm.wait(lambda: len(steps(run_dir)) >= 7, what=lambda: output(tmp_path))

    slurm.call("scancel", "--batch", "--signal=USR2", job)

    assert slurm.end_of(job, tmp_path) == "COMPLETED", output(tmp_path)
    first, second = attempts.read(run_dir)
    assert (first.restart, second.restart) == (0, 1)
    assert first.reason == "time limit (SIGUSR2)"
    assert first.last_step == second.first_step == 7
    assert last_checkpoint(run_dir) == STEPS
    assert (run_dir / "slurm" / "finished.json").is_file()
    assert (run_dir / "slurm" / "script.sbatch").read_text() == (REPOSITORY / "slurm" / "train.sbatch").read_text()
    assert "finished: step 40 of 40" in output(tmp_path)
    assert "time limit (SIGUSR2)" in (run_dir / "report.md").read_text()
    assert steps(run_dir) == losses(standins.rank)


def test_a_signal_during_composition_is_a_pause_too(
    slurm: Any, submit: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}", nodes=1)
    slurm.wait(lambda: f"{job}.0" in slurm.call("squeue", "--steps", "--noheader"))
    slurm.call("scancel", "--batch", "--signal=USR2", job)

    assert slurm.end_of(job, tmp_path) == "COMPLETED", output(tmp_path)
    assert [(each.reason, each.last_step) for each in attempts.read(run_dir)] == [
        ("time limit (SIGUSR2)", 0),
        ("done", STEPS),
    ]


def ranks(slurm: Any, job: str) -> Iterator[psutil.Process]:
    """Processes of a job's steps except the batch step."""
    for process, environment in slurm.processes():
        if environment["SLURM_JOB_ID"] == job and "SLURM_STEP_ID" in environment:
            yield process


def test_a_job_cancelled_during_a_save_stays_cancelled(
    slurm: Any, submit: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    standin(holds_at="7")
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}", nodes=1)
    slurm.wait(lambda: len(steps(run_dir)) >= 7, what=lambda: output(tmp_path))
    held = list(ranks(slurm, job))
    assert held
    for process in held:
        with suppress(psutil.Error):
            process.suspend()  # Slurm wakes them when it cancels
    slurm.call("scancel", "--batch", "--signal=USR2", job)
    slurm.wait(lambda: "SIGUSR2: stopping after this step" in output(tmp_path))
    slurm.call("scancel", job)
    slurm.wait(
        lambda: "queued again" in output(tmp_path) or "cancelled: " in output(tmp_path), what=lambda: output(tmp_path)
    )

    assert "queued again" not in output(tmp_path)
    assert slurm.end_of(job, tmp_path) == "CANCELLED"


def test_a_node_that_fails_is_replaced(
    slurm: Any, submit: Callable[..., str], tmp_path: Path, standin: Callable[..., None], standins: Any
) -> None:
    standin(holds_at="7")
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}", "megatron.save_interval=5")
    slurm.wait(lambda: len(steps(run_dir)) >= 7, what=lambda: output(tmp_path))

    slurm.lose("n2")
    slurm.wait(lambda: slurm.state(job) == "PENDING", what=lambda: output(tmp_path))
    (run_dir / "go").touch()
    slurm.repair("n2")

    assert slurm.end_of(job, tmp_path) == "COMPLETED", output(tmp_path)
    first, second = attempts.read(run_dir)
    assert "killed" in first.reason or first.reason == "cancelled"
    assert second.first_step in (5, 7)  # it may receive the signal, and save, before it is killed
    assert second.last_step == STEPS
    assert steps(run_dir) == losses(standins.rank)


def test_a_run_without_progress_is_given_up(
    slurm: Any, submit: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    standin(fails=True)
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}", "slurm.max_idle=2", nodes=1)

    assert slurm.end_of(job, tmp_path) == "FAILED"
    assert len(attempts.read(run_dir)) == 2
    assert (
        "not queued again: 2 starts without a new checkpoint (a rank failed (exit code 1): RuntimeError: as it was"
        in (output(tmp_path))
    )


def test_a_mistake_is_one_line_and_not_retried(slurm: Any, submit: Callable[..., str], tmp_path: Path) -> None:
    job = submit("recipe=nemotron3_nano/quickstrat", f"run_dir={tmp_path / 'run'}", nodes=1)

    assert slurm.end_of(job, tmp_path) == "FAILED"
    assert (
        "error: recipe=nemotron3_nano/quickstrat: no such recipe: did you mean 'nemotron3_nano/quickstart'?"
        in output(tmp_path)
    )


def test_submit_checks_then_runs(
    slurm: Any, here: Callable[..., str], tmp_path: Path, standin: Callable[..., None]
) -> None:
    standin(holds_at="7")
    run_dir = tmp_path / "run"
    words = ("submit", *WORDS, "cluster=testbed", f"run_dir={run_dir}")

    assert "to start at" in here(*words, "--dry-run"), "what sbatch --test-only says"
    assert not run_dir.exists()
    crowded = here(*words, "cluster.partition=nowhere", code=2)
    assert "error: cluster.partition=nowhere: unknown to Slurm: " in crowded

    here(*words, "slurm.options=['--cpus-per-task=1']")
    job = (run_dir / "slurm" / "job").read_text().strip()
    assert f"error: {run_dir}: its job {job} is" in here(*words, code=2)
    slurm.wait(lambda: len(steps(run_dir)) >= 7, what=lambda: output(run_dir / "slurm"))
    slurm.call("scancel", "--batch", "--signal=USR2", job)
    assert slurm.end_of(job, tmp_path) == "COMPLETED", (run_dir / "slurm" / f"{job}.out").read_text()
    assert last_checkpoint(run_dir) == STEPS
    assert "time limit (SIGUSR2)" in (run_dir / "report.md").read_text()


@pytest.mark.deep
def test_megatron_resumes_exactly_after_a_time_limit(
    slurm: Any, submit: Callable[..., str], train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Megatron's own trainer on two nodes, whose real ranks handle the signal."""
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}")
    slurm.wait(lambda: len(steps(run_dir)) >= 5, seconds=600, what=lambda: output(tmp_path))

    slurm.call("scancel", "--batch", "--signal=USR2", job)

    assert slurm.end_of(job, tmp_path, seconds=600) == "COMPLETED", output(tmp_path)
    first, second = attempts.read(run_dir)
    assert first.reason == "time limit (SIGUSR2)"
    assert 5 <= (first.last_step or 0) == second.first_step < STEPS
    assert last_checkpoint(run_dir) == STEPS
    whole = train_ranks(tmp_path / "whole", *WORDS, ranks=2)
    assert steps(run_dir) == pytest.approx({line["step"]: line["loss"] for line in whole}, rel=1e-5)


SINGULARITY = """#!/usr/bin/env bash
# Records its arguments, then runs the command after the image with another Python.
printf '%s\\n' "$*" >> "$NOTED"
while [ "$1" != "$IMAGE" ]; do shift; done
shift 2
exec "$NEMO_EXT_PYTHON" "$@"
"""


def test_ranks_run_in_a_container_in_a_short_job(
    slurm: Any,
    submit: Callable[..., str],
    tmp_path: Path,
    standin: Callable[..., None],
    random_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm sends its signal at once if the limit is shorter than the script's ten minutes; nothing is interrupted."""
    run_dir, image, noted = tmp_path / "run", tmp_path / "nemo.sif", tmp_path / "noted.txt"
    program = tmp_path / "bin" / "singularity"
    program.parent.mkdir()
    program.write_text(SINGULARITY)
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{slurm.environment['PATH']}"
    for name, value in (("IMAGE", str(image)), ("NOTED", str(noted)), ("PATH", path)):
        monkeypatch.setitem(slurm.environment, name, value)

    container = (
        *("cluster.container.runtime=singularity", f"cluster.container.image={image}"),
        *("cluster.container.options=[--nv]", f"cluster.container.binds=[{tmp_path}]"),
    )
    job = submit(*WORDS, f"run_dir={run_dir}", f"train.tokens={4 * 128}", *container, "--time=00:09:00", nodes=1)

    assert slurm.end_of(job, tmp_path) == "COMPLETED", output(tmp_path)
    (only,) = attempts.read(run_dir)
    assert only.last_step == 4
    site = ("NEMO_EXT_GPUS=none", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "MASTER_ADDR=127.0.0.1")
    given = f"{' '.join(f'--env {each}' for each in site)} {image} python -m "
    compose, ranks, end, report = noted.read_text().splitlines()
    for line, module in ((compose, "prepare compose"), (ranks, "rank"), (end, "prepare compose"), (report, "prepare")):
        assert line.startswith(f"exec --nv --bind {tmp_path} {given}nemo_ext.slurm.{module}")

    words = (f"from={random_llama}", f"to={tmp_path / 'converted'}")
    job = submit(*words, *container, nodes=1, job="convert")
    assert slurm.end_of(job, tmp_path) == "COMPLETED", output(tmp_path)
    assert noted.read_text().splitlines()[-1] == (
        f"exec --nv --bind {tmp_path} {given}nemo_ext.cli convert {' '.join(words)}"
    )
    assert list((tmp_path / "converted").rglob("*.distcp"))


def test_status_logs_and_cancel(
    slurm: Any,
    submit: Callable[..., str],
    nemo_ext: Callable[..., str],
    here: Callable[..., str],
    tmp_path: Path,
    standin: Callable[..., None],
) -> None:
    standin(holds_at="7")
    run_dir = tmp_path / "run"
    job = submit(*WORDS, f"run_dir={run_dir}", nodes=1)
    slurm.wait(lambda: len(steps(run_dir)) >= 7, what=lambda: output(tmp_path))

    assert here("status", str(tmp_path)).splitlines()[1].split()[:3] == [str(run_dir), job, "running"]
    assert "7 / 40" in here("status", str(run_dir))
    assert "iteration" in nemo_ext("logs", str(run_dir), "-n", "200"), "the process becomes `tail`"
    second = submit(*WORDS, f"run_dir={run_dir}", nodes=1)
    assert slurm.end_of(second, tmp_path) == "FAILED"
    assert f"error: {run_dir}: job {job} is running in this folder" in output(tmp_path)
    assert f"cancelled: {job}" in here("cancel", str(run_dir))
    assert slurm.end_of(job, tmp_path) in ("CANCELLED", "FAILED")
    slurm.wait(lambda: "stopped: " in here("status", str(run_dir)), seconds=30)
    assert "no job in the queue" in here("cancel", str(run_dir), code=2)
