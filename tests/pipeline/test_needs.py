"""What a pipeline will take of a cluster."""

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
    # 120,000 steps, one checkpoint in 1000; 9.815 B parameters.
    assert (columns["checkpoints"][0], columns["TB"][0]) == ("120", "16.5")
    assert columns["GPU-hours"][-1] == "129,205", "the sum"


def test_hours_are_not_guessed_for_unknown_gpus() -> None:
    table = needs_of({"pretrain": planned(["job=train", "recipe=olmo1/1b", "run_dir=r", "cluster=testbed"])})

    assert next(iter(table.columns[4].cells)) == "-"
