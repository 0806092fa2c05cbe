"""The report of a run, made only from its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job import run_directory
from nemo_ext.job.config import compose
from nemo_ext.megatron.report import write_report


def made_up_run(run_dir: Path, losses: list[float | None]) -> None:
    run_directory.write_config(run_dir, compose("train", [f"run_dir={run_dir}", "data=mock"]))
    rows: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "val_loss": 6.0}]
    for step, loss in enumerate(losses, start=1):
        rows.append(
            {
                "step": step,
                "tokens": 4096 * step,
                "loss": loss,
                "lr": 1e-3,
                "tokens_per_second": 5000.0,
                "seconds_per_step": 0.8,
                "mfu": 0.3,
            }
        )
    rows += [{"step": len(losses), "tokens": 4096 * len(losses), "val_loss": value} for value in (3.1, 3.0)]
    (run_dir / run_directory.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_it_has_the_results(tmp_path: Path) -> None:
    made_up_run(tmp_path, [5.0, 4.0, 3.0])

    text = write_report(tmp_path).read_text()

    assert "6.0000 at step 0 -> 3.0000 at step 3 (50% lower)" in text
    assert "3 of 200 (not finished)" in text
    assert "2,455,248 (1,496,784 active)" in text
    assert "31.7%" not in text and "30.0%" in text
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_it_has_tokens_per_processor_second(tmp_path: Path) -> None:
    made_up_run(tmp_path, [5.0, 4.0, 3.0])
    assert "processor second" not in write_report(tmp_path).read_text()
    rows = run_directory.read_metrics(tmp_path / run_directory.METRICS)
    # Other work slows the clock, not the processor: 4000 tokens per step on two ranks.
    for row, seconds in zip([row for row in rows if "loss" in row], (0.8, 1.6, 3.2), strict=True):
        row |= {"seconds_per_step": seconds, "tokens_per_second": 4000 / seconds, "cpu_seconds_per_step": 0.5}
    (tmp_path / run_directory.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_directory.read_config(tmp_path / run_directory.CONFIG)
    config["launcher"]["nproc_per_node"] = 2
    run_directory.write_config(tmp_path, config)

    text = write_report(tmp_path).read_text()

    assert "| tokens per second, median | 2,500 |" in text
    assert "| tokens per processor second, median | 4,000 |" in text


def test_it_names_the_precision_plan(tmp_path: Path) -> None:
    made_up_run(tmp_path, [5.0])
    config = run_directory.read_config(tmp_path / run_directory.CONFIG)
    config["precision_plan"] = {"default": "fp8", "recipe": "tensorwise", "rules": ["* bf16", "M>* bf16"]}
    run_directory.write_config(tmp_path, config)

    assert "| precision plan | fp8, tensorwise: * bf16, M>* bf16 |" in write_report(tmp_path).read_text()


def test_a_pattern_does_not_break_the_table(tmp_path: Path) -> None:
    made_up_run(tmp_path, [5.0])
    config = run_directory.read_config(tmp_path / run_directory.CONFIG)
    config["model"]["pattern"] = "MEM*|EME-"
    run_directory.write_config(tmp_path, config)

    rows = [line for line in write_report(tmp_path).read_text().splitlines() if line.startswith("| model |")]

    assert rows == ["| model | nemotron3_nano_tiny: `MEM*\\|EME-` |"]


def test_a_loss_that_was_not_a_number_is_shown_as_such(tmp_path: Path) -> None:
    made_up_run(tmp_path, [5.0, None, 4.0, None])

    assert "training loss, last step | nan" in write_report(tmp_path).read_text()


def test_a_report_without_steps_is_refused(tmp_path: Path) -> None:
    made_up_run(tmp_path, [])

    with pytest.raises(ValueError, match="has no step to report yet"):
        write_report(tmp_path)
