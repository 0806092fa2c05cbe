"""One start of a job: what its end means."""

from pathlib import Path
from typing import cast

import pytest

from nemo_ext.slurm.settings import Settings
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
