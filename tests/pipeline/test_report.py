"""Report of a pipeline, from files of stages written here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.evaluation.store import Key, Sample, Score, Store
from nemo_ext.pipeline.report import write_report
from nemo_ext.pipeline.stages import Pipeline, read
from nemo_ext.slurm import attempts
from tests.composing import write_pipeline

SFT = ["recipe=domyn_small/sft", "launcher.nodes=2", "launcher.nproc_per_node=8"]
STAGES = {
    "pretrain": {"job": "train", "words": ["recipe=olmo1/1b"], "paper": "table 1"},
    "sft": {"job": "train", "words": SFT, "parent": "pretrain", "paper": "section 4.1; GSM8K 77.6"},
    "export": {"job": "convert", "parent": "sft", "words": ["to=${run_dir}/hf"]},
    "grpo": {"job": "rl", "parent": "export", "words": ["preset=domyn_math_grpo", "tasks.train.path=t.jsonl"]},
    "final": {"job": "evaluate", "parent": "grpo", "words": ["suite=domyn"]},
}


def evaluated(folder: Path, right: int) -> None:
    """Write an evaluation with `right` correct answers to the same 40 questions."""
    with Store(folder / "store") as store:
        keys = [Key("sums", f"p{number:02}", "default", "default", 0) for number in range(40)]
        for key in keys:
            store.add(Sample(key=key, asked=key.problem, completion_tokens=9, finish_reason="stop"))
        scores = [float(number < right) for number in range(40)]
        store.add_scores(
            Score(key=key, asked=key.problem, digest="v", score=score, found="")
            for key, score in zip(keys, scores, strict=True)
        )
    found = {"metric": "avg@1", "accuracy": right / 40, "interval": [right / 40 - 0.1, right / 40 + 0.1], "n": 40}
    entry = {"verifier": "v", "weight": 1.0, "higher_is_better": True, "metrics": {}, "modes": {"default": {}}, **found}
    results = {"model": folder.name, "benchmarks": {"sums": entry}, "mean": None, "missing": {}}
    (folder / "asked.json").write_text(json.dumps({"sums": [key.problem for key in keys]}))
    (folder / "results.json").write_text(json.dumps(results))


def started(record: Path, *, job: str, seconds: float) -> None:
    start = attempts.Attempt(job=job, restart=0, nodes="", began=1000.0, first_step=0, ended=1000.0 + seconds)
    attempts.write(record, [start])
    attempts.finish(record, step=None, words=[])


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """A pipeline in tmp_path/r, of which pre-training and SFT were run on Slurm and evaluated."""
    write_pipeline(tmp_path, "mine", STAGES, evaluate=["suite=laptop"])
    found = read([f"--config-dir={tmp_path}", "pipeline=mine", f"run_dir={tmp_path}/r"])
    steps: list[dict[str, Any]] = [
        {"step": step, "loss": 2.0, "tokens": 1000 * step, "mfu": 0.41, "mfu_6n": 0.35, "joules_per_gpu": 500.0}
        for step in range(1, 11)
    ]
    for name, right in (("pretrain", 10), ("sft", 30)):
        started(found.run_dir / name, job="7", seconds=900.0)
        evaluated(found.run_dir / f"evaluate_{name}", right)
        (found.run_dir / name / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return found


def cells(report: str, begins: str) -> list[str]:
    line = next(line for line in report.splitlines() if line.startswith(f"| {begins} |"))
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_a_report_of_stages_with_their_costs_and_what_each_changed(pipeline: Pipeline) -> None:
    """Each next to the paper's results, and compared with the stage that it started from."""
    for second in ("evaluate_grpo", "final"):
        evaluated(pipeline.run_dir / second, 30)
    (pipeline.run_dir / "sft" / "<b>.png").write_bytes(b"picture")
    written = write_report(pipeline, {})
    report, page = written.read_text(), written.with_suffix(".html").read_text()

    row = dict(zip(cells(report, "stage"), cells(report, "sft"), strict=True))
    assert row["GPU-hours"] == "4.00", "16 GPUs for a quarter of an hour"
    assert row["tokens per GPU-hour"] == "2,500"
    assert (row["MFU (exact)"], row["MFU (6N)"]) == ("41.0%", "35.0%")
    assert row["MJ"] == "0.1", "500 J in each of 10 steps on 16 GPUs"
    assert row["paper"] == "section 4.1; GSM8K 77.6"
    assert "evaluate_sft" not in report.split("##")[0], "evaluations have another table"

    changed = report.split("## What each stage changed")[1]
    columns = cells(changed, "stage | from")
    sft, grpo = (dict(zip(columns, cells(changed, name), strict=True)) for name in ("sft | pretrain", "grpo | sft"))
    assert (sft["before"], sft["after"], sft["verdict"]) == ("25.0", "75.0", "better")
    assert sft["difference"].startswith("+50.0 [")
    assert grpo["verdict"] == "no difference shown"
    assert changed.count("| grpo | sft | sums |") == 1 and "| final |" not in changed, "the same model, asked again"

    assert page.count("<table>") == 3
    assert 'src="data:image/png;base64,cGljdHVyZQ=="' in page
    assert "<b>" not in page and "<script" not in page
    assert 'src="compare' not in page


def test_empty_columns_are_omitted(pipeline: Pipeline) -> None:
    started(pipeline.run_dir / "pretrain", job="", seconds=5.0)
    started(pipeline.run_dir / "sft", job="", seconds=5.0)
    for name in ("pretrain", "sft"):
        (pipeline.run_dir / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens": 5, "mfu": null}\n')

    head = cells(write_report(pipeline, {}).read_text(), "stage")
    assert head == ["stage", "job", "after", "state", "seconds", "tokens", "figures", "paper"]


def test_a_separate_evaluation_is_not_a_stage_that_changed_a_model(pipeline: Pipeline) -> None:
    evaluated(pipeline.run_dir / "final", 30)
    changed = write_report(pipeline, {}).read_text().split("## What each stage changed")[1]

    assert changed.count("| grpo | sft | sums |") == 1 and "| final |" not in changed


def test_an_unreadable_file_is_named_and_the_rest_is_reported(pipeline: Pipeline) -> None:
    (pipeline.run_dir / "pretrain" / "metrics.jsonl").write_text("{}\n[1]\n{}\n")
    (pipeline.run_dir / "evaluate_sft" / "results.json").write_text("")

    report = write_report(pipeline, {}).read_text()
    assert "cannot be read: " in cells(report, "pretrain")[-2] and "metrics.jsonl" in cells(report, "pretrain")[-2]
    assert cells(report, "sft")[-1] == "section 4.1; GSM8K 77.6"
    assert "They could not be compared: " in report and "evaluate_sft" in report.split("They could not be compared")[1]


def test_the_command_reports_what_ran_on_slurm(pipeline: Pipeline, tmp_path: Path, command: Callable[..., Any]) -> None:
    words = [f"--config-dir={tmp_path}", "pipeline=mine", "cluster=leonardo", "--report"]
    assert command("pipeline", *words, f"run_dir={tmp_path}/r").returncode == 0
    assert "| finished |" in (tmp_path / "r" / "report.md").read_text()
    code, _, err = command("pipeline", *words, f"run_dir={tmp_path}/nothing")
    assert code == 2 and "no stage of this pipeline has started there" in err
