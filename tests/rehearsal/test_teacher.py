"""Rehearsal of a distillation with its teacher."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nemo_ext.architecture.cost import forward_flops_per_token, total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.checkpoint.start import model_of
from nemo_ext.job.config import compose
from nemo_ext.megatron.preflight import findings
from nemo_ext.rehearsal.ranks import rehearse

TINY = ("recipe=nemotron3_nano/quickstart", "run_dir=unused", "data=mock", "megatron.bf16=true")


@pytest.fixture(params=["run", "export"])
def teacher(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder with the config of a model, without weights."""
    folder, config = tmp_path / "teacher", compose("train", TINY)
    folder.mkdir()
    if request.param == "run":
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    else:
        _, made = choose(from_config(config))
        (folder / "config.json").write_text(json.dumps(made))
    return folder


def test_the_model_of_a_folder_without_weights(teacher: Path) -> None:
    made, own = (
        Architecture.from_config(each)
        for each in (model_of(str(teacher), "distillation.teacher"), compose("train", TINY))
    )
    assert (made.sizes, made.hidden_size, made.vocab_size) == (own.sizes, own.hidden_size, own.vocab_size)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config of a model; expected the run's config\.yaml"):
        model_of(str(tmp_path), "distillation.teacher")
    with pytest.raises(ValueError, match="no such directory"):
        model_of(str(tmp_path / "none"), "distillation.teacher")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        model_of(str(tmp_path), "distillation.teacher")


def test_checks_before_the_queue_count_the_teacher_s_weights(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy("hydra_conf/model/nemotron3_super_120b.yaml", tmp_path / "model")
    site = SimpleNamespace(cluster=SimpleNamespace(node=SimpleNamespace(gpu="H100-80GB", gpu_memory_gib=80, fp8=())))

    def memory(teacher: Path) -> str:
        words = ["recipe=nemotron3_super/puzzle_kd", "run_dir=unused", f"distillation.teacher={teacher}"]
        return next(findings(compose("train", words), site, paths=False, here=False)).text

    assert memory(tmp_path) == "memory: about 43 GiB of the 80 of a H100-80GB"
    assert memory(tmp_path / "none").startswith(
        "memory: about 35 GiB of the 80 of a H100-80GB, without distillation.te"
    )


@pytest.mark.slow
def test_the_teachers_weights_and_forward_pass_are_counted(tmp_path: Path) -> None:
    folder, config = tmp_path / "teacher", compose("train", TINY)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    words = [*TINY, "model.pattern=M*M-", f"distillation.teacher={folder}", "distillation.top_k=8"]
    made = rehearse(compose("rehearse", words), "all", tmp_path / "ranks")
    (rank,) = made["ranks"]

    architecture = Architecture.from_config(config)
    flags: dict[str, Any] = config["megatron"]
    tokens = flags["seq_length"] * flags["global_batch_size"]
    assert rank["peak"]["teacher"] == pytest.approx(2 * total_params(architecture), rel=0.01)
    ahead = forward_flops_per_token(architecture) * tokens
    assert sum(rank["flops"].values()) == pytest.approx(rank["estimate"]["flops"] + ahead, rel=0.1)
    assert not made["set_aside"]
    listed = json.loads(Path(rank["checkpoint"]["list"]).read_text())
    assert not any("decoder.layers.4" in line["name"] for line in listed), "the teacher is not saved"


@pytest.mark.slow
def test_a_teacher_in_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(compose("train", TINY)))
    words = [*TINY, f"distillation.teacher={tmp_path}", "megatron.pipeline_model_parallel_size=2"]

    stages = rehearse(compose("rehearse", [*words, "launcher.nproc_per_node=2"]), "all", tmp_path / "ranks")["ranks"]

    whole = 2 * total_params(Architecture.from_config(compose("train", TINY)))
    assert sum(stage["peak"]["teacher"] for stage in stages) == pytest.approx(whole, rel=0.01)
    with pytest.raises(ValueError, match=r"4 stages on 2 pipeline ranks"):
        rehearse(
            compose("rehearse", [*words, "model.virtual_pipeline_stages=2", "launcher.nproc_per_node=2"]),
            *("all", tmp_path / "virtual"),
        )
