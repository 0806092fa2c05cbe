"""Why a job ended, from the output of Slurm 22 and our ranks on the cluster of test_batch."""

import getpass
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.slurm import attempts, ends, status
from nemo_ext.slurm.ends import first_error, lasts, why

Programs = Callable[..., Path]
RANKS = """\
0:  iteration 3/ 40 | error: none so far
1: Traceback (most recent call last):
0: [rank0]: Traceback (most recent call last):
1:   File "rank.py", line 3, in <module>
0: [rank0]:   File "rank.py", line 3, in <module>
0: [rank0]: FileNotFoundError: [Errno 2] No such file or directory: 'data_train.idx'
1:     raise ConnectionError(
1: ConnectionError: rank 0 is gone
srun: error: n1: task 0: Exited with exit code 1
"""
MEMORY = """\
2026-11-22 13:00:00 start 1 of runs/a, nodes n1
0: Traceback (most recent call last):
0: torch.distributed.DistBackendError: NCCL error
slurmstepd-n1: error: StepId=4.batch exceeded memory limit (574062592 > 314572800), being killed
slurmstepd-n1: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-22T13:41:30 ***
"""
JOB = "JobId=7 JobName=train r JobState={state} Reason={reason} Dependency=(null) RunTime=00:00:01 TimeLimit=00:10:00 "
JOB += "EndTime=2026-11-22T13:41:33 NodeList={nodes} NumNodes=1 ExitCode={code} StdOut=/no such/7.out Power="


@pytest.fixture
def said(tmp_path: Path, programs: Programs) -> Path:
    """Stand-in for scontrol, without accounting and without queued jobs."""
    said = tmp_path / "said.txt"
    programs(scontrol=f"cat {said}", squeue=":", sacct="echo accounting is disabled >&2; exit 1")
    said.write_text("slurm_load_jobs error: Invalid job id specified\n")
    return said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (RANKS, "FileNotFoundError: [Errno 2] No such file or directory: 'data_train.idx'"),
        (MEMORY, "out of memory (StepId=4.batch exceeded memory limit (574062592 > 314572800), being killed)"),
        ("error: run_dir=/proc/nope: no\n", "run_dir=/proc/nope: no"),
        ("srun: fatal: SLURM_MEM_PER_CPU: one of them\n", "srun: fatal: SLURM_MEM_PER_CPU: one of them"),
        (
            "srun: error: Node failure on n2\nslurmstepd-n2: error: *** JOB 9 ON n2 CANCELLED AT 2026-11-22T13:41:33 "
            "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n",
            "node failure (n2)",
        ),
        (
            "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T13:43:00 DUE TO TIME LIMIT ***\n",
            "time limit at 2026-11-22T13:43:00",
        ),
        ("slurmstepd-n1: error: *** JOB 3 ON n1 CANCELLED AT 13:41 ***\n", "cancelled at 13:41"),
        ("slurmstepd-n1: error: *** JOB 3 ON n1 CANCELLED AT 13:41 DUE TO JOB REQUEUE ***\n", ""),
        ("srun: error: n1: task 0: Killed\n", "n1: task 0: Killed: node out of memory, unless somebody killed it"),
        (f"{MEMORY}2026-11-22 13:50:00 start 2 of runs/a, nodes n1\nall is well\n", ""),
        ("a step\n", ""),
    ],
)
def test_the_first_error_of_the_last_start(tmp_path: Path, text: str, error: str) -> None:
    log = tmp_path / "7.out"
    log.write_text(text)

    assert first_error(log) == error
    assert first_error(log, len(text)) == ""


@pytest.mark.parametrize(
    "error",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data_train.idx'",
        "NotADirectoryError: [Errno 20] Not a directory: 'x/y'",
        "IsADirectoryError: [Errno 21] Is a directory: 'x'",
        "PermissionError: [Errno 13] Permission denied: 'x'",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: cannot import name 'x'",
        "no space left in runs/a",
        "no inode left in runs/a",
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 122] Disk quota exceeded: '/scratch/x'",
        "RuntimeError: [enforce fail at inline_container.cc:595] . PytorchStreamWriter: No space left on device",
        "OSError: [Errno 30] Read-only file system: 'x'",
        "AttributeError: 'NoneType' object has no attribute 'shape'",
        "NameError: name 'x' is not defined",
        "TypeError: f() got an unexpected keyword argument",
        "KeyError: 'model'",
        "IndexError: list index out of range",
        "ValueError: tensor parallel size 3 does not divide 8",
        "AssertionError: batch size",
        "AssertionError",
        "NotImplementedError: FP8 on this device",
        "ZeroDivisionError: division by zero",
        "SyntaxError: invalid syntax",
        "RecursionError: maximum recursion depth exceeded",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte",
        "json.decoder.JSONDecodeError: Expecting value",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error",
        "_pickle.UnpicklingError: invalid load key",
        "omegaconf.errors.ConfigAttributeError: Key 'x' is not in struct",
        "nemo_ext.checkpoint.storage.CheckpointError: x is not a complete checkpoint",
        "megatron.core.dist_checkpointing.core.CheckpointingException: x is not a distributed checkpoint",
        "RuntimeError: Error(s) in loading state_dict for GPTModel:",
        "RuntimeError: Global shape mismatch: size mismatch for weight",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "out of memory (StepId=4.batch exceeded memory limit (574062592 > 314572800), being killed)",
    ],
)
def test_errors_that_a_restart_cannot_fix(error: str) -> None:
    assert lasts(error)


@pytest.mark.parametrize(
    "error",
    [
        "",
        "torch.distributed.DistBackendError: NCCL error",
        "ConnectionError: rank 0 is gone",
        "TimeoutError: timed out",
        "RuntimeError: CUDA error: unspecified launch failure",
        "OSError: [Errno 5] Input/output error",
        "OSError: [Errno 116] Stale file handle",
        "node failure (n2)",
        "n1: task 0: Killed: node out of memory, unless somebody killed it",
        "a word about a ValueError: that is no exception",
    ],
)
def test_errors_that_may_not_recur(error: str) -> None:
    assert not lasts(error)


@pytest.mark.parametrize(
    ("facts", "output", "expected"),
    [
        (
            {"state": "FAILED", "reason": "JobLaunchFailure", "code": "0:53"},
            None,
            "the output file could not be opened on its node: /no such/7.out; create its folder on a disk that all",
        ),
        (
            {"state": "CANCELLED", "reason": "JobHeldUser", "nodes": "(null)"},
            None,
            "cancelled at 2026-11-22T13:41:33 while it was queued and held",
        ),
        ({"state": "CANCELLED", "reason": "None"}, "", "cancelled at 2026-11-22T13:41:33"),
        (
            {"state": "CANCELLED", "reason": "DependencyNeverSatisfied", "nodes": "(null)"},
            None,
            "cancelled by Slurm: a job that it depends on failed",
        ),
        ({"state": "FAILED", "reason": "JobLaunchFailure", "code": "0:9"}, MEMORY, "killed by SIGKILL: out of memory"),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "code": "1:0"}, RANKS, "exit code 1: FileNotFoundError: "),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "code": "28:0"}, "", "no space left in "),
        ({"state": "NODE_FAIL", "reason": "NodeDown"}, None, "node failure"),
        ({"state": "TIMEOUT", "reason": "TimeLimit", "code": "0:15"}, "", "time limit of 00:10:00"),
        ({"state": "OUT_OF_MEMORY", "reason": "OutOfMemory", "code": "0:125"}, "", "out of memory"),
    ],
)
def test_the_reason_comes_from_slurm(
    said: Path, tmp_path: Path, facts: dict[str, str], output: str | None, expected: str
) -> None:
    said.write_text(JOB.format(**{"nodes": "n1", "code": "0:0", **facts}) + "\n")
    if output is not None:
        (tmp_path / "7.out").write_text(output)

    assert why(tmp_path, "7").startswith(expected)


def test_accounting_names_the_user_who_cancelled(said: Path, tmp_path: Path, programs: Programs) -> None:
    programs(sacct="echo 'CANCELLED by 0|0:0|01:00:00|2026-11-22T13:41:33|n1|train r'")

    assert why(tmp_path, "7") == "cancelled by root at 2026-11-22T13:41:33"


def started(folder: Path, **end: str) -> Path:
    attempts.begin(folder, job="7", restart=0, nodes="n1", step=0)
    if end:
        attempts.end(folder, step=0, **end)
    return folder


def state(folder: Path) -> str:
    return status.status_of(folder, {}).state


def test_a_run_reports_why_it_stopped(said: Path, tmp_path: Path) -> None:
    failed = "a rank failed (exit code 1): ValueError: x"
    given_up = started(tmp_path / "a", reason=failed, given_up="max_restarts=3")
    idle = started(tmp_path / "d", reason=failed, given_up=f"3 starts without a new checkpoint ({failed})")
    killed = started(tmp_path / "b")
    (killed / "slurm" / "7.out").write_text("2026-11-22 13:00:00 start 1 of b: step 0\n")
    queued_again = started(tmp_path / "c", reason="time limit (SIGUSR2)")

    assert state(given_up) == "stopped: a rank failed (exit code 1): ValueError: x; not queued again: max_restarts=3"
    assert state(idle) == f"stopped: not queued again: 3 starts without a new checkpoint ({failed})"
    assert "its output ends: 2026-11-22 13:00:00 start 1 of b: step 0; no new checkpoint was saved" in state(killed)
    assert state(queued_again) == "stopped: time limit (SIGUSR2); no new checkpoint was saved"
    said.write_text(JOB.format(state="CANCELLED", reason="BeginTime", code="0:0", nodes="(null)"))
    assert state(queued_again).endswith("then cancelled at 2026-11-22T13:41:33 while it was queued")
    said.write_text(JOB.format(state="TIMEOUT", reason="TimeLimit", code="0:15", nodes="n1"))
    assert state(killed) == "stopped: time limit of 00:10:00; no new checkpoint was saved"


def test_a_run_on_a_full_disk_reports_it(said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(tmp_path / "a")
    monkeypatch.setattr(status, "no_room", lambda place: f"no space left in {place}")

    assert state(run) == f"stopped: no space left in {run}; no new checkpoint was saved"
    said.write_text(JOB.format(state="FAILED", reason="NonZeroExitCode", code="1:0", nodes="n1"))
    assert state(run) == f"stopped: no space left in {run}; exit code 1; no new checkpoint was saved"


def test_a_start_of_an_older_record_has_one_reason(said: Path, tmp_path: Path) -> None:
    """It does not state whether the job was requeued: Slurm's information is about the same end."""
    said.write_text(JOB.format(state="FAILED", reason="NonZeroExitCode", code="1:0", nodes="n1"))
    run = started(tmp_path / "a", reason="a rank failed (exit code 1): ValueError: x")
    record = run / "slurm" / attempts.ATTEMPTS
    record.write_text(json.dumps([{k: v for k, v in json.loads(record.read_text())[0].items() if k != "given_up"}]))

    assert state(run) == "stopped: a rank failed (exit code 1): ValueError: x"


def test_the_end_of_a_newer_job_counts(said: Path, tmp_path: Path) -> None:
    """The job never started, so the reason of the previous start is not its reason."""
    run = started(tmp_path / "a", reason="time limit (SIGUSR2)")
    (run / "slurm" / ends.JOB).write_text("12\n")
    said.write_text(JOB.format(state="FAILED", reason="JobLaunchFailure", code="0:53", nodes="n1"))

    assert state(run).startswith("stopped: the output file could not be opened on its node")


@pytest.mark.parametrize(
    ("name", "output", "own"),
    [
        ("train r", "/no such/%j.out", True),
        ("train r", "/no such/../no such/7.out", True),
        ("train r", "/other/%j.out", False),
        ("evaluate r", "/no such/7.out", False),
    ],
)
def test_a_reused_job_id_is_not_the_runs(
    said: Path, tmp_path: Path, programs: Programs, name: str, output: str, own: bool
) -> None:
    run = started(tmp_path / "a", reason="time limit (SIGUSR2)", given_up="")
    (run / "slurm" / ends.JOB).write_text("7\n")
    (run / "slurm" / ends.SUBMITTED).write_text(f"sbatch '--job-name={name}' '--output={output}' train.sbatch\n")
    cancelled = tmp_path / "cancelled.txt"
    programs(squeue="echo '7|RUNNING|None'", scancel=f"echo $* > {cancelled}")
    said.write_text(JOB.format(state="RUNNING", reason="None", code="0:0", nodes="n1"))

    assert status.queued_job(run, status.queued()) == ("7" if own else "")
    assert status.status_of(run, status.queued()).state.startswith("running" if own else "stopped: time limit")
    if own:
        assert status.cancel(run) == ["7"]
    else:
        with pytest.raises(ValueError, match="the last was 7, an id that now belongs to another job"):
            status.cancel(run)
    assert cancelled.exists() == own
    said.write_text(JOB.format(state="FAILED", reason="NonZeroExitCode", code="1:0", nodes="n1"))
    assert why(run / "slurm", "7") == ("exit code 1" if own else "")


def test_a_job_that_was_submitted_by_hand_has_its_starts_name_and_output(said: Path, tmp_path: Path) -> None:
    said.write_text(JOB.format(state="RUNNING", reason="None", code="0:0", nodes="n1"))
    for output, own in (("/no such/7.out", True), ("/no such/slurm-7.out", False)):
        run = tmp_path / str(own)
        attempts.begin(run, job="7", restart=0, nodes="n1", step=0, name="train r", output=output)
        assert ends.is_own(run / "slurm", "7") == own


def test_a_cancellation_with_our_command_is_recorded(said: Path, tmp_path: Path, programs: Programs) -> None:
    run = started(tmp_path / "a")
    programs(squeue="echo '7|PENDING|JobHeldUser'", scancel="")
    queue = status.queued()
    assert queue == {"7": "pending (JobHeldUser: `scontrol release 7` releases it)"}

    status.cancel(run)

    assert state(run).startswith(f"stopped: cancelled by {getpass.getuser()} at 20")
    assert ends.noted(run / "slurm", "8") == ""
