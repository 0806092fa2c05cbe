"""Conversion of hybrids with latent experts and multi-token prediction, exactly and in both directions."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_ext.checkpoint import hf
from nemo_ext.checkpoint import merge as merging
from nemo_ext.checkpoint.description import from_config, to_config
from nemo_ext.checkpoint.formats import choose, read
from nemo_ext.data.text.indexed_dataset import Ids
from nemo_ext.job.config import compose

SMALL = ["model=nemotron3_nano_tiny", "++megatron.moe_latent_size=48", "megatron.norm_epsilon=1e-5"]
Command = Callable[..., Any]


@pytest.fixture
def convert(megatron: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the job `convert`, and returns its output."""
    from nemo_ext import parity

    def run(*words: str) -> str:
        parity.convert(compose("convert", list(words)))
        return "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("model", "tensors", "elements", "prediction"),
    [
        # The published checkpoints' own numbers of tensors and elements.
        ("nemotron35_lightning_30b", 6_513, 32_913_266_240, 270),
        ("nemotron3_super_120b", 42_683, 123_611_033_088, 1_040),
    ],
)
def test_published_checkpoints_have_the_tensors_that_are_expected(
    model: str, tensors: int, elements: int, prediction: int
) -> None:
    description = from_config(compose("describe", [f"model={model}"]))

    hf_format, facts = choose(description)
    sizes = {
        name: torch.Size(shape).numel()
        for entry in hf_format.entries(description)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }

    assert hf_format.architecture == "NemotronHForCausalLM"
    assert (facts["num_nextn_predict_layers"], facts["mtp_layers_block_type"]) == (1, ["attention", "moe"])
    assert (len(sizes), sum(sizes.values())) == (tensors, elements)
    assert sum(name.startswith("mtp.") for name in sizes) == prediction
    assert sizes["mtp.layers.0.eh_proj.weight"] == 2 * facts["hidden_size"] ** 2
    assert {"mtp.layers.0.mixer.q_proj.weight", "mtp.layers.1.mixer.gate.weight"} < sizes.keys()
    assert "mtp.layers.1.final_layernorm.weight" in sizes
    assert read(facts)[1].architecture.pattern == description.architecture.pattern
    written = to_config(description)
    assert from_config(written) == description


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000 makes more than 2048 blocks"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers='1'"),
        ({"num_nextn_predict_layers": False}, "num_nextn_predict_layers=False"),
        (
            {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": [["attention"]]},
            "mtp_layers_block_type=.*expected",
        ),
        ({"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": []}, "mtp_layers_block_type=.*expected"),
        ({"mtp_hybrid_override_pattern": "*E/*E"}, "mtp_hybrid_override_pattern=.* only the letters"),
        ({"hybrid_override_pattern": "ME*|-"}, "hybrid_override_pattern=.* only the letters"),
        ({"moe_latent_size": 0}, "moe_latent_size=0"),
    ],
)
def test_an_invalid_config_is_one_error(change: dict[str, Any], message: str) -> None:
    facts = choose(from_config(compose("describe", [*SMALL, "model.pattern=ME*-/*E"])))[1]

    with pytest.raises(ValueError, match=message):
        read({**facts, **change})


def test_depths_with_one_set_of_weights_are_one_depth_in_a_checkpoint() -> None:
    repeated = compose("describe", [*SMALL, "model.pattern=ME*-/*E/*E", "+megatron.mtp_use_repeated_layer=true"])
    once = compose("describe", [*SMALL, "model.pattern=ME*-/*E"])

    assert from_config(repeated) == from_config(once)


def test_there_and_back_and_without(tmp_path: Path, train_ranks: Command, convert: Command) -> None:
    """A trained model's Hugging Face folder loads in transformers, which ignores MTP, and its way back is exact."""
    from nemo_ext.parity import compare

    words = (*SMALL, "model.pattern=ME*-/*E/*E", "train.tokens=512", "train.warmup_tokens=0")
    train_ranks(tmp_path / "run", *words)

    convert(f"from={tmp_path / 'run'}", f"to={tmp_path / 'hf'}")
    convert(f"from={tmp_path / 'hf'}", f"to={tmp_path / 'back'}")
    convert(f"from={tmp_path / 'back'}", f"to={tmp_path / 'again'}")
    dropped = convert(f"from={tmp_path / 'back'}", f"to={tmp_path / 'without'}", "mtp=drop")

    first, again, without = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again", "without"))
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert without.keys() == {name for name in first if not name.startswith("mtp.")}
    assert re.search(r"mtp=drop: \d+ tensors are not converted", dropped)
    ids: Ids = np.random.default_rng(1).integers(0, 257, 40).astype(np.int32)
    for name in ("hf", "without"):
        compared = compare(tmp_path / name, tmp_path / "run", [ids])
        assert compared.largest < 1e-4 < 0.1 < compared.deviation, name


def test_prediction_is_averaged_in_both_formats(tmp_path: Path) -> None:
    found, config = choose(from_config(compose("describe", ["model=nemotron3_super_tiny"])))
    made = []
    for seed, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        torch.manual_seed(seed)
        entries = found.entries(read(config)[1])
        tensors = {
            name: torch.randn(shape) for each in entries for name, shape in zip(each.names, each.shapes, strict=True)
        }
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        made.append(tensors)
        plan = hf.plan(tmp_path / name, tmp_path / f"{name}_megatron", hf.Settings())
        hf.convert(plan, hf.Settings(), progress=False)
    for ending in ("", "_megatron"):
        sources = [tmp_path / f"first{ending}", tmp_path / f"second{ending}"]
        merging.merge(merging.plan(sources, tmp_path / f"mean{ending}", merging.Settings()), progress=False)
    hf.convert(hf.plan(tmp_path / "mean_megatron", tmp_path / "back", hf.Settings()), hf.Settings(), progress=False)

    mean, back = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "back"))
    assert sum(name.startswith("mtp.") for name in mean) == 32
    for name, tensor in mean.items():
        expected = ((made[0][name].double() + made[1][name].double()) / 2).float()
        assert torch.equal(tensor, expected) and torch.equal(back[name], expected), name


def test_missing_tensors_name_the_way_out(tmp_path: Path, train_ranks: Command, convert: Command) -> None:
    train_ranks(tmp_path / "run", *SMALL, "model.pattern=ME*-", "train.tokens=512", "train.warmup_tokens=0")
    convert(f"from={tmp_path / 'run'}", f"to={tmp_path / 'hf'}")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))

    with pytest.raises(ValueError, match=r"no tensors mtp\.\*: set mtp=drop"):
        convert(f"from={tmp_path / 'hf'}", f"to={tmp_path / 'back'}")
    convert(f"from={tmp_path / 'hf'}", f"to={tmp_path / 'back'}", "mtp=drop")
