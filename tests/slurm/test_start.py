"""One start of a job: what its end means."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from nemo_ext.job.config import USER_ERROR
from nemo_ext.slurm import attempts
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
    said: str, cancelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{said}'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "65")

    assert Work(cast(Settings, None), [])._is_cancelled() == cancelled


class Server(Work):
    """A server that ends as after a mistake in its words, which name its folder and the signals that end it."""

    def prepare(self) -> Prepared:
        return Prepared(record=Path(self.words[0]), step=None, target=None)

    def work(self) -> int:
        self.stopped += map(int, self.words[1:])
        return USER_ERROR

    def verdict(self, code: int) -> str | None:
        return attempts.TIME_LIMIT if self.stopped else "a mistake in the command"


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Handlers that a start sets are taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "given_up"),
    [([signal.SIGUSR2], "scontrol requeue: not today"), ([], "it would end so again")],
)
def test_what_the_time_limit_ends_is_queued_again_whatever_its_code(
    signals: list[int], given_up: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    for name, does in {"squeue": "echo 'RUNNING|0:20'", "scontrol": "echo 'not today' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "65")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    words = [str(tmp_path / "run"), *(str(int(number)) for number in signals)]

    Server(settings_of(["job=serve"]), words).run()

    (start,) = attempts.read(tmp_path / "run")
    assert start.given_up == given_up
