"""Start of a job, and classification of its end."""

import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from nemo_ext.job.config import FAILED, USER_ERROR
from nemo_ext.job.ranks import reserve_port
from nemo_ext.slurm import attempts, start
from nemo_ext.slurm.settings import Settings, settings_of
from nemo_ext.slurm.start import Batch, Prepared


class Work(Batch):
    """A job that does nothing."""

    def prepare(self) -> Prepared:
        return Prepared(Path(), None, None)

    def work(self) -> int:
        return 0

    def interrupt(self) -> None: ...

    def saved(self) -> int | None:
        return None

    def verdict(self, code: int) -> str | None:
        return None

    def conclude(self) -> None: ...


@pytest.mark.parametrize(
    ("said", "cancelled"),
    [
        ("COMPLETING|1:00:00", True),
        ("COMPLETING|0:05", False),
        ("RUNNING|1:00:00", False),
        ("COMPLETING|UNLIMITED", False),
    ],
)
def test_a_job_that_ends_well_before_its_limit_was_cancelled(
    said: str, cancelled: bool, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(squeue=f"echo '{said}'")
    monkeypatch.setenv("SLURM_JOB_ID", "65")

    assert Work(cast(Settings, None), [])._is_cancelled() == cancelled


def test_jobs_on_one_node_get_different_ports() -> None:
    """Of three jobs that select the same port, whose own processes listen on it."""
    with reserve_port() as free:
        first = free.getsockname()[1]
    with start.reserve_port_from(first, 1000, 7000) as one, start.reserve_port_from(first, 1000, 8000) as two:
        ports = [held.getsockname()[1] for held in (one, two)]
        with socket.create_server(("127.0.0.1", ports[0])) as listening:
            with start.reserve_port_from(first, 1000, 0) as three:
                ports.append(three.getsockname()[1])
            with pytest.raises(ValueError, match=f"no port from {ports[0]} to {ports[0]} is free on"):
                start.reserve_port_from(ports[0], 1, 0)
            assert listening.getsockname()[1] == ports[0]

    assert len(set(ports)) == 3 and min(ports) >= first


@pytest.mark.parametrize(
    ("said", "container", "expected"),
    [
        (
            "535.54.03, A100\\n535.54.03, A100",
            False,
            r"2 x A100, driver 535.54.03, but torch .* CUDA 13.*driver 580 or later",
        ),
        ("535.54.03, A100", True, r"1 x A100, driver 535.54.03$"),
        ("580.65.06, H100\\n580.65.06, H200", False, r"1 x H100, 1 x H200, driver 580.65.06$"),
        ("No devices were found", True, "unknown: nvidia-smi: No devices"),
        ("", False, "unknown: "),
    ],
)
def test_a_start_reports_the_driver_of_its_node(
    said: str, container: bool, expected: str, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(**{"nvidia-smi": f"printf '{said}'"})
    monkeypatch.setattr(start, "_cuda_of_torch", lambda: "13.0")
    assert start.gpu_line(container=container) == ""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")

    assert re.match(f"GPUs of .*: {expected}", start.gpu_line(container=container))


def test_a_start_without_nvidia_smi_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")

    assert "nvidia-smi" in start.gpu_line(container=False)


def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    assert start._cuda_of_torch() == torch.version.cuda


class Server(Work):
    """A server that ends with a user's mistake; its words name its folder and the signals that end it."""

    def prepare(self) -> Prepared:
        return Prepared(record=Path(self.words[0]), step=None, target=None)

    def work(self) -> int:
        self.stopped += map(int, self.words[1:])
        return USER_ERROR

    def verdict(self, code: int) -> str | None:
        return attempts.TIME_LIMIT if self.stopped else "a mistake in the command"


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restores the handlers that a start sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def slurm_says_no(
    tmp_path: Path, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> Path:
    """A running job that Slurm does not requeue; returns a folder for it."""
    programs(squeue="echo 'RUNNING|0:20'", scontrol="echo 'not today' >&2; exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "65")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    return tmp_path


@pytest.mark.parametrize(
    ("signals", "given_up"), [([signal.SIGUSR2], "scontrol requeue: not today"), ([], "it would recur in a new start")]
)
def test_a_job_ended_by_the_time_limit_is_requeued_for_any_exit_code(
    signals: list[int], given_up: str, slurm_says_no: Path
) -> None:
    words = [str(slurm_says_no / "run"), *(str(int(number)) for number in signals)]

    Server(settings_of(["job=serve"]), words).run()

    (start,) = attempts.read(slurm_says_no / "run")
    assert start.given_up == given_up


class Failing(Server):
    """Training that fails at the step named in its words, with an error that would recur at the next start."""

    def prepare(self) -> Prepared:
        record = Path(self.words[0])
        return Prepared(record=record, step=0, target=9, log=record / "train.log")

    def work(self) -> int:
        record = Path(self.words[0])
        if step := int(self.words[1]):
            (record / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        (record / "train.log").write_text("0: Traceback (most recent call last):\n0: KeyError: 'a'\n")
        return FAILED

    def saved(self) -> int:
        return 0

    def verdict(self, code: int) -> str:
        return "a rank failed"


@pytest.mark.parametrize(
    ("step", "given_up"), [(0, "the error would recur in a new start"), (3, "scontrol requeue: not today")]
)
def test_a_start_without_a_step_is_not_retried_after_a_permanent_error(
    step: int, given_up: str, slurm_says_no: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = slurm_says_no / "run"

    assert Failing(settings_of(["job=train"]), [str(record), str(step)]).run() == FAILED

    (start,) = attempts.read(record)
    assert (start.reason, start.given_up) == ("a rank failed: KeyError: 'a'", given_up)
    assert "is saved" not in capsys.readouterr().out
