"""Servers next to the stages that use them, with a simulated queue."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.slurm import attempts, beside
from nemo_ext.slurm.ends import JOB


@pytest.fixture
def queue(tmp_path: Path, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the output of squeue; squeue fails without it."""
    said = tmp_path / "queue"
    programs(squeue=f"cat {said}")
    monkeypatch.setattr(beside, "SECONDS", 0.1)
    return said


def test_a_server_stays_while_a_job_that_uses_it_is_queued(queue: Path, tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    for record, job in ((first, "5"), (second, "6_0")):
        (record / attempts.FOLDER).mkdir(parents=True)
        (record / attempts.FOLDER / JOB).write_text(job)
    beside.note_asking(tmp_path / "judge", [first, second])
    asking = beside.asking(tmp_path / "judge")

    for said, asked in (("5|RUNNING|None\n", True), ("6_0|PENDING|Dependency\n", True), ("7|RUNNING|None\n", False)):
        queue.write_text(said)
        assert beside.is_asked(asking) is asked, said
    queue.unlink()
    assert beside.is_asked(asking), "Slurm does not answer"
    assert beside.asking(tmp_path / "first") == []


def test_a_stage_waits_until_its_server_answers_or_left_the_queue(queue: Path, tmp_path: Path) -> None:
    said, address = list[str](), tmp_path / "judge" / "endpoint.json"
    address.parent.mkdir()
    beside.note_servers(tmp_path / "asks", {"9": str(address.parent)})
    beside.wait(tmp_path / "asks", said.append, [15])  # asked to stop
    queue.write_text("5|RUNNING|None\n")
    beside.wait(tmp_path / "asks", said.append, [])
    waiting = f"waiting until the server of job 9 is up and writes {address}"
    assert said == [waiting, waiting, "job 9 of the server has left the queue"]

    address.write_text("{}")
    os.utime(address, (time.time() - 3600,) * 2)
    beside.wait(tmp_path / "asks", said.append, [])
    assert said[-1] == "job 9 of the server has left the queue", "an old file does not mean a server"
    address.touch()
    beside.wait(tmp_path / "asks", said.append, [])
    beside.wait(tmp_path / "nothing", said.append, [])
    assert len(said) == 5
