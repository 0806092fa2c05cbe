"""The starts of a run in its report, and the steps lost between them."""

import json
from pathlib import Path

import pytest

from nemo_ext.job.run_directory import METRICS
from nemo_ext.slurm import attempts
from nemo_ext.slurm.timeline import PICTURE, add_section


def logged(run_dir: Path, *steps: int) -> None:
    lines = [{"step": step, "loss": 1.0, "seconds_per_step": 2.0} for step in steps]
    (run_dir / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_starts_with_their_ends_and_lost_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.time", lambda: now)
    attempts.begin(tmp_path, job="7", restart=0, nodes="n[1-2]", step=0)
    logged(tmp_path, *range(1, 137))
    later(3600)  # and is killed: the next start finds a checkpoint of step 120
    attempts.begin(tmp_path, job="7", restart=1, nodes="n[3-4]", step=120)
    logged(tmp_path, *range(1, 901))
    later(1600)
    attempts.end(tmp_path, step=900, reason="time limit (SIGUSR2)")
    attempts.begin(tmp_path, job="7", restart=2, nodes="n[1-2]", step=900)
    later(100)
    report = tmp_path / "report.md"
    report.write_text("# before\n")

    add_section(report)

    first, second, third = attempts.read(tmp_path)
    assert (first.lost, second.lost, third.lost) == (16, 0, 0)
    lines = report.read_text().splitlines()
    assert lines[0] == "# before" and f"![steps over time]({PICTURE})" in lines
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert [row[4:7] for row in rows if row[0].isdecimal()] == [
        ["1.00", "0 to 120", "16"],
        ["0.44", "120 to 900", ""],
        ["0.03", "900 to 900", ""],
    ]
    assert rows[-1][-1] == "runs" and rows[-3][-1].startswith("killed with its node")
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_starts_has_no_section(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    report.write_text("# before\n")
    add_section(report)
    assert report.read_text() == "# before\n" and not (tmp_path / PICTURE).exists()
