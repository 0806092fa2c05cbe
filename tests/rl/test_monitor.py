"""Verdicts of the monitor of RL runs."""

from pathlib import Path

import pytest

from nemo_ext.job.records import json_line
from nemo_ext.job.report import Report
from nemo_ext.job.run_directory import METRICS, REPORT
from nemo_ext.rl.algorithms import load
from nemo_ext.rl.monitor import FIGURES, PLOT, add_section
from nemo_ext.rl.report import write_report

NAN = float("nan")
BY_NAME = {figure.name: figure for figure in FIGURES}


@pytest.mark.parametrize(
    ("name", "values", "verdict"),
    [
        ("guards/mismatch", [1.01] * 20, "good"),
        ("guards/mismatch", [1.01] * 9 + [1.5] + [1.01] * 10, "high in 1 of 20 steps, but not at the end"),
        ("guards/mismatch", [1.01] * 18 + [1.2] * 2, "too high at the end"),
        ("guards/replayed_routes", [1.0, 0.9], "too low at the end"),
        ("entropy", [2.0, 1.0, 0.5], "good"),
        ("entropy", [2.0, 1.0, 0.3], "too low at the end"),
        ("grad_norm", [0.1] * 10 + [2.0] + [0.1] * 10, "high in 1 of 21 steps, but not at the end"),
        ("grad_norm", [0.0, 0.0, 1e3, 1e10, 1e20], "too high at the end"),
        ("grad_norm", [0.0] * 3, "always 0"),
        ("grad_norm", [1.0] * 19 + [NAN] * 20, "not finite since step 20"),
        ("entropy", [NAN, 1.0, NAN, NAN], "not finite since step 3"),
        ("entropy", [NAN, 1.0, NAN, 1.0], "not finite in 2 of 4 steps, last in step 3"),
        ("entropy", [NAN], "not finite since step 1"),
    ],
)
def test_a_verdict_depends_on_the_end_and_on_outliers(name: str, values: list[float], verdict: str) -> None:
    assert BY_NAME[name].verdict(range(1, len(values) + 1), values) == verdict


def test_the_section_has_the_figures_of_the_run_with_advice(tmp_path: Path) -> None:
    report = Report("run")
    logs = [{"step": step, "guards/mismatch": 1.2, "entropy": 1.0, "grad_norm": 0.0} for step in range(1, 4)]
    lost = {"step": 3, "eval_reward": 1.0, "guards/outside_bounds": None}

    add_section(report, [*logs, lost])
    text = report.write(tmp_path / "report.md").read_text()

    rows = [line for line in text.splitlines() if line.startswith("| ") and "verdict" not in line and "--" not in line]
    assert [row.split(" | ")[5] for row in rows] == [
        "too high at the end",
        "not finite since step 3",
        "good",
        "always 0",
    ]
    assert "rl.router.replay=true" in rows[0] and "a checkpoint before" in rows[1] and (tmp_path / PLOT).is_file()


def test_a_run_without_figures_has_no_section() -> None:
    report = Report("run")
    add_section(report, [{"step": 1, "loss": 0.5}])

    assert report.markdown() == "# run\n"


def test_the_report_of_a_run_shows_values_that_are_not_finite(tmp_path: Path) -> None:
    algorithm = load("rl_zero")
    write_report(tmp_path, algorithm)
    assert not (tmp_path / REPORT).exists()
    lines = [{"step": step, "reward": 0.5, "grad_norm": 1.0 if step < 3 else float("nan")} for step in range(1, 6)]
    (tmp_path / METRICS).write_bytes(b"".join(map(json_line, lines)))

    write_report(tmp_path, algorithm)

    assert "not finite since step 3" in (tmp_path / REPORT).read_text()
