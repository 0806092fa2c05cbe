"""NeMo-RL's own DPO trains on a CPU with its loss and with RPO's."""

import importlib
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_ext.rl.nemo_rl.run import run
from nemo_ext.rl.rpo import rpo_loss

pytestmark = pytest.mark.nemo_rl

COMMON = (
    "dpo.max_num_steps=2",
    "dpo.val_period=0",
    "dpo.val_at_start=false",
    "++dpo.val_at_end=false",
    "dpo.reference_policy_kl_penalty=0.5",
    "dpo.sft_loss_weight=0",
    "policy.train_global_batch_size=2",
    "policy.train_micro_batch_size=2",
    "data.max_input_seq_length=100",
)


def pairs(count: int) -> list[dict[str, Any]]:
    return [
        {
            "context": [{"role": "user", "content": f"question {n} "}],
            "completions": [
                {"rank": 1, "completion": [{"role": "assistant", "content": "bad"}], "reward": 0.5 * n},
                {"rank": 0, "completion": [{"role": "assistant", "content": "good"}], "reward": 2.0},
            ],
        }
        for n in range(count)
    ]


@pytest.fixture
def rpo(nemo_rl: ModuleType) -> ModuleType:
    return importlib.import_module("nemo_ext.rl.nemo_rl.rpo")


def untrained_loss(wanted: float) -> float:
    """RPO's loss if policy and reference are equal."""
    return float(rpo_loss(torch.tensor(0.0), torch.tensor(wanted), "backward_kl"))


@pytest.mark.parametrize("algorithm", ["dpo", "rpo"])
def test_two_steps(
    algorithm: str,
    rpo: ModuleType,
    dpo_stage: Any,
    dpo_config: Callable[..., dict[str, Any]],
    jsonl: Callable[..., Path],
) -> None:
    config = {
        "algorithm": algorithm,
        "nemo_rl": dpo_config(*COMMON),
        "pairs": {"train": str(jsonl("pairs.jsonl", pairs(4))), "rendered": True},
    }
    if algorithm == "rpo":
        config["rpo"] = {"eta": 3.0, "distance": "backward_kl"}

    run(config)

    first, second = dpo_stage.policy.losses
    # At first the policy is the reference: its margins are 0.
    expected = sum(untrained_loss(3 * (2 - 0.5 * n)) for n in range(2)) / 2 if algorithm == "rpo" else math.log(2)
    assert first == pytest.approx(expected, rel=1e-5)
    # Trained towards "good": the second loss is less than it would be untrained.
    untrained = sum(untrained_loss(3 * (2 - 0.5 * n)) for n in (2, 3)) / 2 if algorithm == "rpo" else math.log(2)
    assert second < untrained
    if algorithm == "rpo":
        assert dpo_stage.policy.batches[0]["preference_rewards"].tolist() == [2.0, 0.0, 2.0, 0.5]


def test_validation_of_a_batch_that_is_padded(
    rpo: ModuleType, dpo_stage: Any, dpo_config: Callable[..., dict[str, Any]], jsonl: Callable[..., Path]
) -> None:
    validated = (
        "dpo.val_at_start=true",
        "dpo.val_period=1",
        "dpo.val_batches=2",
        "dpo.val_global_batch_size=2",
        "dpo.val_micro_batch_size=2",
    )

    run(
        {
            "algorithm": "rpo",
            "nemo_rl": dpo_config(*COMMON, *validated),
            "pairs": {
                "train": str(jsonl("train.jsonl", pairs(4))),
                "validation": str(jsonl("validation.jsonl", pairs(3))),
                "rendered": True,
            },
            "rpo": {"eta": 1.0},
        }
    )

    assert any(prefix.startswith("validation") for prefix, _ in dpo_stage.logger.logged)


def test_it_is_pickled_by_reference(rpo: ModuleType, dpo_config: Callable[..., dict[str, Any]]) -> None:
    dpo = importlib.import_module("nemo_rl.algorithms.dpo")
    compat = importlib.import_module("nemo_ext.rl.nemo_rl.compat")
    config = compat.master_config(dpo, dpo_config(*COMMON))
    loss = dpo.DPOLossFn(compat.setting(config, "dpo"))

    again = pickle.loads(pickle.dumps(rpo.RPOLoss(loss, eta=3, distance="squared")))

    assert (again.eta, again.distance, again.reference_policy_kl_penalty) == (3.0, "squared", 0.5)
    for settings, message in (({"eta": 0}, "rpo.eta"), ({"eta": 1, "distance": "bwd"}, "rpo.distance")):
        with pytest.raises(ValueError, match=message):
            rpo.RPOLoss(loss, **settings)
