"""Status of runs; Slurm's queue is simulated here and real in test_batch."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nemo_ext.slurm import attempts, ends, status, submit
from nemo_ext.slurm.status import cancel, follow, goodput, job_of, log_of, queued, runs_below, show, status_of


def run(folder: Path, *, job: str = "7", step: int = 30, reason: str = "", finished: bool = False) -> Path:
    attempts.begin(folder, job=job, restart=0, nodes="n1", step=0)
    if reason:
        attempts.end(folder, step=step, reason=reason)
    if finished:
        attempts.finish(folder, step=step, words=[])
    (folder / "config.yaml").write_text(yaml.safe_dump({"megatron": {"train_iters": 100}}))
    line = {"step": step, "loss": 2.5, "seconds_per_step": 60.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


@pytest.fixture
def queue(tmp_path: Path, programs: Callable[..., Path]) -> Path:
    """A file with the output of squeue."""
    said = tmp_path / "queue.txt"
    said.write_text("")
    programs(squeue=f"cat {said}", scancel=f'echo "$@" >> {tmp_path}/cancelled.txt')
    return said


def test_states(tmp_path: Path) -> None:
    runs = {
        "running": run(tmp_path / "a"),
        "finished": run(tmp_path / "b", reason="done", step=100, finished=True),
        "stopped: a rank failed (exit code 1)": run(tmp_path / "c", reason="a rank failed (exit code 1)", job="9"),
        f"stopped: Slurm has no record of job 8, and there is no {tmp_path}/d/slurm/8.out: it was cancelled while "
        "queued, or that file could not be opened on its node; "
        "no new checkpoint was saved": run(tmp_path / "d", job="8"),
        "pending (Priority)": run(tmp_path / "e", reason="time limit (SIGUSR2)", job="6"),
    }
    jobs = {"7": "running", "6": "pending (Priority)"}
    jobs_of_b = {"6": "pending"}

    for state, folder in runs.items():
        assert status_of(folder, jobs_of_b if state == "finished" else jobs).state == state
    running = status_of(runs["running"], jobs)
    assert (running.step, running.target, running.loss, running.seconds_left) == (30, 100, 2.5, 70 * 60)
    assert status_of(runs["finished"], {}).seconds_left is None


def test_a_queued_job_shows_why_its_starts_failed(tmp_path: Path) -> None:
    waits = {"7": "pending (BeginTime)"}
    failed = "a rank failed (exit code 1): ConnectionError: gone"
    for reason in (failed, "time limit (SIGUSR2)", failed, "node failure"):
        folder = run(tmp_path / "a", reason=reason, step=0)

    assert (
        status_of(folder, waits).state
        == f"pending (BeginTime); starts 1, 3 failed: {failed}; start 4 failed: node failure"
    )
    run(folder, reason=failed, step=30)
    assert status_of(folder, waits).state == "pending (BeginTime)", "it got on"


def test_the_newest_job_counts(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", job="7", reason="cancelled")
    (folder / "slurm" / ends.JOB).write_text("12\n")

    assert job_of(folder) == "12"
    assert status_of(folder, {"12": "pending (Resources)"}).state == "pending (Resources)"
    attempts.begin(folder, job="13", restart=0, nodes="n1", step=30)
    assert job_of(folder) == "13"
    assert status_of(folder, {}).restarts == 1
    (folder / "slurm" / ends.JOB).write_text("3\n")
    os.utime(folder / "slurm" / ends.JOB, (time.time() + 3600,) * 2)
    assert job_of(folder) == "3", "Slurm's numbers began again"


def test_the_queue_is_read(queue: Path) -> None:
    queue.write_text("7|RUNNING|None\n12|PENDING|Priority\n14_3|PENDING|(Dependency)\n")

    assert queued() == {"7": "running", "12": "pending (Priority)", "14_3": "pending ((Dependency))"}


def test_the_table(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue.write_text("7|RUNNING|None\n")
    run(tmp_path / "runs" / "domyn" / "cpt")
    run(tmp_path / "runs" / "olmo", reason="cancelled", job="5")

    show([tmp_path / "runs"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "job", "state", "step", "left", "loss", "restarts", "goodput"]
    assert lines[1].split()[1:] == ["7", "running", "30", "/", "100", "1:10", "h", "2.500", "0", "100%"]
    assert "stopped: cancelled" in lines[2]
    (tmp_path / "runs" / "tasks" / "slurm").mkdir(parents=True)
    (tmp_path / "runs" / "tasks" / "slurm" / ends.JOB).write_text("7\n")
    show([tmp_path / "runs" / "tasks"])
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["7", "running", "-", "0"], "a job without steps"
    show([tmp_path / "runs" / "domyn", tmp_path / "runs" / "olmo"], as_json=True)
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["running", "stopped: cancelled"]


def test_logs_are_of_the_ranks_or_the_job(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    with pytest.raises(ValueError, match="no output of a job yet"):
        log_of(folder)
    (folder / "slurm" / "7.out").write_text("start")
    assert log_of(folder).name == "7.out"
    (folder / "train.log").write_text("step")
    assert log_of(folder).name == "train.log"


def test_a_log_is_followed_from_the_queue_to_the_ranks(queue: Path, tmp_path: Path) -> None:
    folder, told = tmp_path / "a", tmp_path / "told"
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm" / ends.JOB).write_text("7\n")
    with pytest.raises(ValueError, match="no output of a job yet"):
        follow(folder, 5)
    queue.write_text("7|PENDING|Priority\n")
    happens = [
        ("waiting for job 7: pending (Priority)\n", "7_0.out", "start\n"),
        ("start\n", "7_1.out", "another task\n"),
        ("start\n", "../train.log", "step 1\n"),
    ]
    code = f"from nemo_ext.slurm.status import *; follow(Path({str(folder)!r}), 5)"
    with told.open("wb") as out, subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out) as process:

        def wait(for_text: str) -> None:
            limit = time.monotonic() + 60
            while not told.read_text().endswith(for_text) and process.poll() is None and time.monotonic() < limit:
                time.sleep(0.02)

        for text, name, written in happens:
            wait(text)
            (folder / "slurm" / name).write_text(written)
        wait("step 1\n")
        process.terminate()

    lines = told.read_text().splitlines()
    assert lines == [happens[0][0].strip(), f"{folder}/slurm/7_0.out", "start", f"{folder}/train.log", "step 1"]


def test_a_job_is_cancelled(queue: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    with pytest.raises(ValueError, match="no job in the queue, so there is nothing to cancel; the last was 7"):
        cancel(folder)
    queue.write_text("7|RUNNING|None\n")

    assert cancel(folder) == ["7"]
    assert (tmp_path / "cancelled.txt").read_text() == "7\n"


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no run at or below .* was submitted to Slurm"):
        runs_below([tmp_path])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="squeue is not on PATH"):
        queued()


def test_a_failing_squeue_does_not_end_a_wait(
    programs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = run(tmp_path / "a"), tmp_path / "calls"
    monkeypatch.setattr(submit, "planned", lambda words: SimpleNamespace(records=[folder]))
    monkeypatch.setattr(submit, "POLL", 0.0)
    monkeypatch.setattr(status, "_RETRY", 0.0)
    says = "1) echo '7|RUNNING|None';; 2) echo 'controller is down' >&2; exit 1;;"
    programs(squeue=f"echo >> {calls}\ncase $(wc -l < {calls}) in {says} esac")

    submit.complete([])

    assert calls.read_text() == "\n" * 3
    calls.write_text("\n")
    with pytest.raises(ValueError, match="controller is down"):
        queued()


def test_goodput_is_the_share_of_steps_that_count(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    lines = [{"step": step, "loss": 2.0, "seconds_per_step": 3.0} for step in (9, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = attempts.Attempt(job="7", restart=0, nodes="n", began=1000.0, first_step=0, ended=1040.0)
    starts = [first, replace(first, began=1050.0, ended=1100.0)]

    assert goodput(folder, starts) == pytest.approx(0.3)
    assert goodput(folder, []) is None and goodput(tmp_path / "none", starts) is None
