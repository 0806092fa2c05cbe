"""Leases of workers that die, stop, and are on other machines."""

import time
from pathlib import Path

import psutil
import pytest

from nemo_ext.job import leases
from nemo_ext.job.leases import Leases


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Leases:
    """Leases as seen on another machine, where processes cannot be checked."""
    monkeypatch.setattr(leases, "_place", lambda: "another machine")
    return Leases(tmp_path, 0.3)


def test_only_one_of_two_holds_a_lease_until_it_is_released(tmp_path: Path) -> None:
    one, two = Leases(tmp_path, 60), Leases(tmp_path, 60)

    assert (one.take("a"), two.take("a"), one.holds("a"), two.holds("a")) == (True, False, True, False)
    one.drop("a")
    assert two.take("a")


def test_only_touches_keep_a_lease(elsewhere: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_place", lambda: "here")
    one = Leases(tmp_path, 0.3)
    assert one.take("a")
    for _ in range(6):
        assert not elsewhere.take("a")
        time.sleep(0.1)
        one.touch()
    assert not elsewhere.take("a")
    time.sleep(0.4)

    assert elsewhere.take("a")


def test_a_holder_on_another_machine_is_not_judged_by_local_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Leases(tmp_path, 60).take("a")
    text = (tmp_path / "a").read_text().replace(f'"pid": {psutil.Process().pid}', '"pid": 4194999')
    (tmp_path / "a").write_text(text)
    monkeypatch.setattr(leases, "_place", lambda: "another machine")

    assert not Leases(tmp_path, 60).take("a")


def test_a_worker_that_lost_a_lease_neither_keeps_nor_ends_it(tmp_path: Path) -> None:
    one, two = Leases(tmp_path, 60), Leases(tmp_path, 60)
    one.take("a")
    (tmp_path / "a").unlink()
    two.take("a")
    before = (tmp_path / "a").stat().st_mtime_ns

    one.touch()
    assert (one.holds("a"), (tmp_path / "a").stat().st_mtime_ns) == (False, before)
    one._held.add("a")
    one.drop("a")
    assert (tmp_path / "a").exists()


def test_a_dead_local_process_is_noticed_at_once_and_a_changed_clock_ends_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Leases(tmp_path, 60), Leases(tmp_path, 60)
    one.take("a")
    started = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started(self) + 30)
    assert not two.take("a")

    text = (tmp_path / "a").read_text().replace(f'"pid": {psutil.Process().pid}', '"pid": 4194999')
    (tmp_path / "a").write_text(text)
    assert two.take("a")
