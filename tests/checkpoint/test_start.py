"""The model of the checkpoint that a run starts from."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_ext.architecture.pattern import parse
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.pickles import METADATA
from nemo_ext.checkpoint.start import as_checkpoint, model_of_start
from nemo_ext.job.config import compose

WORDS = ("run_dir=unused", "data=mock", "model=llama_nemotron_tiny", "megatron.lr=0.5")


def run_of(start: Path | None, *, asked: bool = True) -> dict[str, Any]:
    words = [*WORDS, f"train.model_of_start={str(asked).lower()}"]
    return compose("train", [*words, f"megatron.pretrained_checkpoint={start or 'null'}"])


@pytest.fixture
def child(tmp_path: Path) -> Path:
    """A checkpoint without weights, whose description is of a different model than `WORDS`."""
    made = compose("describe", ["model=llama_nemotron_tiny", 'model.pattern="*-*{kv=2}-"', "model.name=child"])
    folder = tmp_path / "child"
    (folder / "model").mkdir(parents=True)
    (folder / METADATA).touch()
    sections = {name: made[name] for name in ("model", "megatron")}
    (folder / "model" / "child.yaml").write_text(yaml.safe_dump(sections))
    return folder


def test_a_run_uses_the_model_of_its_start(child: Path) -> None:
    made = {**run_of(child), **model_of_start(run_of(child))}

    assert made["model"]["pattern"] == "*-*{kv=2}-"
    assert made["model"]["name"] == "child"
    assert made["megatron"]["lr"] == 0.5
    assert from_config(made) != from_config(run_of(child))
    assert model_of_start(run_of(child, asked=False)) == {}


def test_depths_with_one_set_of_weights_stay_the_runs(child: Path) -> None:
    made = compose("describe", ["model=nemotron3_super_tiny", "model.name=child"])
    (child / "model" / "child.yaml").write_text(yaml.safe_dump({name: made[name] for name in ("model", "megatron")}))

    changed = {**run_of(child), **model_of_start(run_of(child))}

    assert changed["model"]["pattern"] == "MEM*EME-/*E/*E"
    flags = {name: value for name, value in changed["megatron"].items() if name.startswith("mtp_")}
    assert flags == {"mtp_use_repeated_layer": True, "mtp_loss_scaling_factor": 0.3}


def test_a_recipe_does_not_share_weights_that_the_depths_of_the_start_have_of_their_own(child: Path) -> None:
    made = compose("describe", ["model=nemotron3_super_tiny", "megatron.mtp_use_repeated_layer=null"])
    (child / "model" / "child.yaml").write_text(yaml.safe_dump({name: made[name] for name in ("model", "megatron")}))
    words = ["run_dir=unused", "data=mock", "model=nemotron3_super_tiny", "train.model_of_start=true"]
    config = compose("train", [*words, f"megatron.pretrained_checkpoint={child}", "megatron.mtp_loss_scaling_factor=1"])
    assert config["megatron"]["mtp_use_repeated_layer"]

    changed = {**config, **model_of_start(config)}

    assert from_config(changed).prediction == from_config(made).prediction
    assert len(from_config(changed).prediction) == 4
    assert changed["megatron"]["mtp_loss_scaling_factor"] == 1


def test_a_start_without_depths_takes_the_recipe_s_mtp_flags_for_new_ones_alone(child: Path) -> None:
    words = ["run_dir=unused", "data=mock", "recipe=nemotron3_super/sft", "model=nemotron3_super_tiny"]
    words += ["train.model_of_start=true", f"megatron.pretrained_checkpoint={child}"]

    plain, new = (model_of_start(compose("train", [*words, *more])) for more in ([], ["train.new_mtp='/*-/*-'"]))

    assert not [name for name in plain["megatron"] if name.startswith("mtp_")]
    assert parse(new["model"]["pattern"]).depths == 2 and new["megatron"]["mtp_use_repeated_layer"]


@pytest.mark.parametrize("asked", [True, False])
def test_new_depths_are_added_to_the_model(child: Path, asked: bool) -> None:
    config = run_of(child, asked=asked)
    main = "*-*{kv=2}-" if asked else config["model"]["pattern"]
    config["train"]["new_mtp"] = "/*-/*-"

    assert parse(model_of_start(config)["model"]["pattern"]) == parse(f"{main}/*-/*-")


@pytest.mark.parametrize(
    ("depths", "pattern", "message"),
    [
        ("*-", "*-", r"train.new_mtp=\*-: expected depths of multi-token prediction, such as /\*E"),
        ("/*-", "*-/*-", r"train.new_mtp=/\*-: model.pattern=\*-/\*- already has multi-token prediction"),
        ("/*?", "*-", r"train.new_mtp=/\*\?: "),
        ("/*-/*M", "*-", r"train.new_mtp=/\*-/\*M: .*depth"),
    ],
)
def test_depths_that_do_not_fit_are_refused(child: Path, depths: str, pattern: str, message: str) -> None:
    config = run_of(child, asked=False)
    config["train"]["new_mtp"], config["model"]["pattern"] = depths, pattern

    with pytest.raises(ValueError, match=message):
        model_of_start(config)
    config["megatron"]["pretrained_checkpoint"] = None
    with pytest.raises(ValueError, match=r"train.new_mtp=.* requires megatron.pretrained_checkpoint"):
        model_of_start(config)


def test_a_run_directory_means_its_checkpoints(child: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    child.rename(run / "checkpoints")
    (run / "model").symlink_to(run / "checkpoints" / "model")

    made = model_of_start(run_of(run))

    assert made["megatron"]["pretrained_checkpoint"] == str(run / "checkpoints")
    assert made["model"]["name"] == "child"


def test_missing_checkpoints_are_left_to_later_checks(child: Path) -> None:
    assert model_of_start(run_of(child.with_name("later"))) == {}

    with pytest.raises(ValueError, match=r"train.model_of_start=true requires megatron.pretrained_checkpoint"):
        model_of_start(run_of(None))
    (child / "model" / "child.yaml").unlink()
    with pytest.raises(ValueError, match="its model is unknown"):
        model_of_start(run_of(child))


def test_a_job_on_a_checkpoint_uses_its_model_and_tokenizer(child: Path) -> None:
    (child / "hf_files").mkdir()
    described = yaml.safe_load((child / "model" / "child.yaml").read_text())
    described["megatron"]["padded_vocab_size"] = 1280
    (child / "model" / "child.yaml").write_text(yaml.safe_dump(described))
    (child / "hf_files" / "tokenizer.json").touch()
    config = compose("puzzle", ["recipe=puzzle/quickstart", f"puzzle.parent={child}", "run_dir=r"])

    made = as_checkpoint(config, child)

    assert made["model"]["pattern"] == "*-*{kv=2}-"
    assert made["megatron"]["padded_vocab_size"] == 1280
    assert made["puzzle"] == config["puzzle"]
    assert made["data"]["tokenizer"] == {"kind": "huggingface", "path": str(child / "hf_files" / "tokenizer.json")}
    assert made["data"]["directory"] == "r/data"
    named = {**config, "data": {**config["data"], "tokenizer": {"kind": "huggingface", "path": "mine"}}}
    assert as_checkpoint(named, child)["data"] == named["data"]
