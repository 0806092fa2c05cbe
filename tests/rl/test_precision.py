"""Precision plan of an RL run, resolved for the model."""

import json
from pathlib import Path

import pytest

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.job.config import compose
from nemo_ext.job.settings import checked
from nemo_ext.rl.precision import Precision
from nemo_ext.rl.settings import NemoRl


@pytest.fixture
def policy(tmp_path: Path) -> str:
    """Folder with the config.json of Domyn-Small's tiny model."""
    _, values = choose(from_config(compose("describe", ["model=domyn_small_tiny", "model.pattern='(*-)x3'"])))
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path)


def test_blocks_outside_fp8_are_named(policy: str) -> None:
    plan = {"default": "fp8", "rules": ["first 1 bf16", "3.fc2 bf16", "head bf16"]}

    found = Precision.from_config({"precision_plan": plan, "policy": policy})

    assert found is not None and not found.head
    assert found.high == (*(f"layers.0.self_attn.{name}_proj" for name in "qkvo"), "layers.1.mlp.down_proj")
    assert found.in_("generation") and not found.in_("training")


def test_precision_is_none_without_a_plan_or_fp8(policy: str) -> None:
    assert Precision.from_config({"precision_plan": None, "policy": policy}) is None
    assert Precision.from_config({"policy": policy}) is None
    assert Precision.from_config({"precision_plan": {"default": "bf16"}, "policy": policy}) is None


def test_mistakes_are_reported(policy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nemo_rl.fp8_in='train': input should be 'generation', 'training' or 'both'"):
        checked(NemoRl, {"backend": "megatron", "set": {}, "fp8_in": "train"}, "nemo_rl")
    with pytest.raises(ValueError, match=r"precision_plan requires .* model=.*no config\.json"):
        Precision.from_config({"precision_plan": {"default": "fp8"}, "policy": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="names block 9"):
        Precision.from_config({"precision_plan": {"default": "fp8", "rules": ["9 bf16"]}, "policy": policy})
