"""Estimates of a pipeline's nodes, hours and storage."""

from pathlib import Path

import pytest

from nemo_ext.pipeline.needs import needs_of
from nemo_ext.slurm.submit import Submission, planned


@pytest.fixture
def submissions() -> dict[str, Submission]:
    """Domyn-Small's CPT on Leonardo, a conversion and an array of servers."""
    words = {
        "cpt": ["job=train", "recipe=domyn_small/cpt", "run_dir=r"],
        "export": ["job=convert", "from=r", "to=hf"],
        "serve": ["job=serve", "model=hf", "serving.replicas=3", "serving.gpus=2"],
    }
    return {name: planned([*each, "cluster=leonardo"]) for name, each in words.items()}


def test_hours_follow_from_tokens_flops_and_peak(submissions: dict[str, Submission]) -> None:
    table = needs_of(submissions)
    columns = {str(column.header): list(column.cells) for column in table.columns}

    # 503,316,480,000 tokens of 100.9 GFLOP at 35 % of 312 TFLOP/s.
    assert columns["GPU-hours"][0] == "129,205"
    assert columns["hours"][0] == "504.7"
    assert (columns["nodes"], columns["GPUs"]) == (["64", "1", "3", ""], ["256", "-", "6", ""])
    # A checkpoint every 1000 of 120,000 steps; the last three and every tenth are kept; 9.815 B parameters.
    assert (columns["checkpoints"][0], columns["TB"][0]) == ("15", "2.1")
    assert columns["starts"] == ["22", "-", "-", ""], "of 24 hours"
    assert columns["hours"][1:] == ["-", "-", ""]
    assert columns["node-hours"] == ["32,301", "1*", "2*", "32,301 + 2*"]
    assert columns["core-hours"] == ["1,033,637", "32*", "48*", "1,033,637 + 80*"]
    assert columns["GPU-hours"][1:] == ["-", "6*", "129,205 + 6*"], "the sum"
    assert columns["TB"][1:] == ["-", "-", "2.1"]


def test_storage_of_data_and_rl_models_is_counted(tmp_path: Path, random_llama: Path) -> None:
    streams = f"data.directory={tmp_path}/d"
    words = {
        "tokenize": ["job=tokenize", "data=local_text", streams],
        "pretrain": ["job=train", "recipe=olmo1/1b", "data=local_text", streams, "run_dir=r"],
        "rl": ["job=rl", "preset=domyn_math_grpo", f"model={random_llama}", "tasks.train.path=t", "run_dir=rl"],
    }
    table = needs_of({name: planned([*each, "cluster=leonardo"]) for name, each in words.items()})

    # 2 T tokens at 4 bytes; 50 checkpoints of 1.176 B parameters at 14 bytes; a small RL model.
    assert list(table.columns[-1].cells) == ["8.0", "0.8", "0.0", "8.8"]


def test_hours_are_not_guessed_for_unknown_gpus() -> None:
    table = needs_of({"pretrain": planned(["job=train", "recipe=olmo1/1b", "run_dir=r", "cluster=testbed"])})

    assert next(iter(table.columns[5].cells)) == "-"
