"""Curricula that a run makes during training, with TRL and a random model."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rl.job import run
from tests.json_lines import read_jsonl, write_jsonl

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")


def job(*words: str) -> None:
    run(compose("rl", words))


def write(path: Path, first: int, count: int) -> None:
    """Tasks for responses of one to four words, which a random model sometimes writes."""

    def task(number: int) -> dict[str, Any]:
        rule = {
            "id": "length_constraints:number_words",
            "kwargs": {"num_words": 1 + number % 4, "relation": "at least"},
        }
        reference = {"instructions": [rule], "mode": "all"}
        return {"id": f"t{number}", "environment": "instructions", "prompt": f"{number}", "reference": reference}

    write_jsonl(path, map(task, range(first, first + count)))


def cut_back(run_dir: Path, step: int, curricula: int) -> None:
    """Reduce a finished run to its state at a step, with a number of curricula."""
    shutil.rmtree(run_dir / "model")
    for checkpoint in (run_dir / "checkpoints").glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    for folder in (run_dir / "curricula").iterdir():
        if folder.is_dir() and int(folder.name) > curricula:
            shutil.rmtree(folder)


def test_several_processes_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("preset=rl_zero", "model=m", "rl.schedule.steps=2", f"run_dir={tmp_path / 'run'}")

    with pytest.raises(ValueError, match=r"nproc_per_node=2 does not support tasks\.train\.reprofile; remove one"):
        job(*words, "tasks.train={path: t.jsonl, reprofile: {every: 2}}", "launcher.nproc_per_node=2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"start `nemo-ext rl` without torchrun and accelerate"):
        job(*words, "tasks.train.path=t.jsonl")
    assert "loading" not in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_pass_rates_are_measured_again_and_a_killed_run_resumes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.jsonl", 0, 13)
    write(tmp_path / "validation.jsonl", 100, 2)
    words = (
        *("preset=rl_zero", f"model={model}", "environments={instructions: {}}", "on_inexpressible=warn"),
        *(f"tasks.train.path={tmp_path}/train.jsonl", f"tasks.validation.path={tmp_path}/validation.jsonl"),
        "tasks.train.reprofile={every: 2, plateau: 1, times: 2, samples: 3, curriculum: {sigma: 0.4}}",
        *("rl.prompts_per_step=2", "rl.generations_per_prompt=4", "rl.batch=8", "micro_batch=8"),
        *("rl.lengths.response=12", "rl.schedule={kind: constant, steps: 6}", "rl.validation.every=2", "save_every=5"),
    )
    whole = tmp_path / "whole"

    job(*words, f"run_dir={whole}")

    changes = [json.loads((whole / f"curricula/{n}/begun.json").read_text()) for n in (1, 2)]
    assert [change["step"] for change in changes] == [2, 4]
    assert changes[0]["checkpoint"] == "checkpoint-2"
    assert not (whole / "curricula" / "3").exists(), "at most the allowed number of curricula"
    rollouts, report = read_jsonl(whole / "rollouts.jsonl"), (whole / "report.md").read_text()
    for number, change in enumerate(changes, start=1):
        folder = whole / "curricula" / str(number)
        assert len(read_jsonl(folder / "rollouts.jsonl")) == 13 * 3
        until = changes[1]["drawn"] if number == 1 else None
        drawn = [line["id"] for line in rollouts[4 * change["drawn"] :: 4]][: until and until - change["drawn"]]
        step = [line["id"] for line in read_jsonl(folder / "curriculum.jsonl")][: len(drawn)]
        assert sorted(drawn[:2]) == sorted(step[:2]), "the first step after the change"
        assert f"| {change['step']} | {change['why']} |" in report
    logs = [log for log in read_jsonl(whole / "metrics.jsonl") if "reward" in log]
    assert [log["step"] for log in logs] == list(range(1, 7))
    for log in logs:
        scores = [line["score"] for line in rollouts if line["step"] == log["step"]]
        assert log["instructions/correct"] == pytest.approx(sum(scores) / len(scores)), "only of the step's responses"

    # States after a kill: during a measurement, in the middle of a line; and between a checkpoint and its curriculum.
    for step, begun in ((2, 1), (4, 1)):
        killed = tmp_path / f"killed{step}"
        shutil.copytree(whole, killed)
        cut_back(killed, step, begun)
        if step == 2:
            folder = killed / "curricula" / "1"
            answers = (folder / "rollouts.jsonl").read_text()
            for path in folder.iterdir():
                path.unlink()
            (folder / "begun.json").write_text(json.dumps(changes[0]))
            (folder / "rollouts.jsonl").write_text(answers[: len(answers) // 2])
        capsys.readouterr()

        job(*words, f"run_dir={killed}")

        assert f"resuming from step {step}" in capsys.readouterr().err
        assert read_jsonl(killed / "rollouts.jsonl") == rollouts
        for number in (1, 2):
            for name in ("begun.json", "rollouts.jsonl", "curriculum.jsonl"):
                both = (run_dir / "curricula" / str(number) / name for run_dir in (killed, whole))
                assert next(both).read_text().strip() == next(both).read_text().strip(), name
