"""Parsing of a pipeline: order, hand-over of models, evaluations, twins, selection of stages."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.job.job import will_exist
from nemo_ext.job.registry import job as find
from nemo_ext.pipeline.stages import read
from nemo_ext.slurm.jobs import makes
from tests.composing import write_pipeline

TWINS = sorted((Path(hydra_conf.__file__).parent / "pipeline").glob("*/*.yaml"))
CHAIN = {
    "pretrain": {"job": "train", "words": ["recipe=olmo1/1b"]},
    "sft": {"job": "train", "parent": "pretrain"},
    "export": {"job": "convert", "parent": "sft", "words": ["to=${run_dir}/hf"]},
    "grpo": {"job": "rl", "parent": "export"},
    "dpo": {"job": "rl", "parent": "grpo"},
    "fp8": {"job": "quantize", "parent": "dpo", "words": ["to=${run_dir}/fp8_model"]},
    "bench": {"job": "evaluate", "parent": "sft"},
}


def chain(folder: Path, stages: dict[str, Any], *words: str, **keys: Any) -> dict[str, tuple[str, ...]]:
    """Arguments of each stage of a file, in run order."""
    write_pipeline(folder, "mine", stages, **keys)
    found = read([f"--config-dir={folder}", "pipeline=mine", "run_dir=r", *words])
    return {stage.name: stage.words for stage in found.stages}


def test_a_stage_starts_from_the_model_that_its_parent_makes(tmp_path: Path) -> None:
    words = chain(tmp_path, CHAIN)

    assert "megatron.pretrained_checkpoint=r/pretrain/checkpoints" in words["sft"]
    assert "from=r/sft" in words["export"]
    assert "model=r/hf" in words["grpo"]
    assert "model=r/grpo/model" in words["dpo"]
    assert "from=r/dpo/model" in words["fp8"]
    assert "model=r/sft" in words["bench"]
    assert "model=elsewhere" in chain(tmp_path, CHAIN, "export.to=elsewhere")["grpo"], (
        "the parent's last argument counts"
    )
    assert "model=mine" in chain(tmp_path, CHAIN, "grpo.model=mine")["grpo"], "and the user's own"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"a": {"job": "train"}, "b": {"job": "rl", "parent": "a"}}, "b.parent=a: rl needs a Hugging Face folder"),
        ({"a": {"job": "rl_tasks"}, "b": {"job": "rl", "parent": "a"}}, "b.parent=a: rl_tasks does not write a model"),
        ({"a": {"job": "train"}, "b": {"job": "rl_tasks", "parent": "a"}}, "rl_tasks does not start from a model"),
        (
            {"a": {"job": "train"}, "b": {"job": "train", "parent": "aa"}},
            "b.parent=aa: no such stage: did you mean 'a'",
        ),
        ({"a": {"job": "train", "after": ["b"]}, "b": {"job": "train"}}, "a, b wait for each other"),
        (
            {"a": {"job": "serve"}, "b": {"job": "rl", "parent": "a"}},
            "b.parent=a: a server does not end; name it",
        ),
        (
            {"a": {"job": "serve"}, "b": {"job": "rl", "after": ["a"]}},
            "b.after=a: a server does not end; name it",
        ),
        (
            {"a": {"job": "serve"}, "b": {"job": "rl", "beside": ["c"]}},
            "b.beside=c: no such stage with `job: serve`: known: a",
        ),
        ({"a": {"job": "train"}, "b": {"job": "rl", "beside": ["a"]}}, "b.beside=a: no such stage with `job: serve`"),
    ],
)
def test_a_model_that_cannot_be_handed_over_is_named(tmp_path: Path, stages: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        chain(tmp_path, stages)
    assert said in str(raised.value)


def test_stages_keep_their_order_but_come_after_their_dependencies(tmp_path: Path) -> None:
    stages = {
        "train": {"job": "train", "after": ["tasks"]},
        "export": {"job": "convert", "parent": "train", "words": ["to=hf"]},
        "tasks": {"job": "rl_tasks", "after": []},
    }

    assert list(chain(tmp_path, stages, evaluate=["suite=laptop"])) == ["tasks", "train", "evaluate_train", "export"]
    text = read([f"--config-dir={tmp_path}", "pipeline=mine", "run_dir=r", "skip=[export]"]).text
    assert list(yaml.safe_load(text)["stages"]) == ["tasks", "train", "evaluate_train", "export"]


def test_a_server_comes_before_the_stage_that_uses_it(tmp_path: Path) -> None:
    stages = {
        "judge": {"job": "serve", "parent": "grpo"},
        **CHAIN,
        "rlhf": {"job": "rl", "parent": "dpo", "beside": ["judge"], "after": ["fp8"]},
    }
    words = chain(tmp_path, stages)

    assert list(words)[-4:] == ["fp8", "judge", "bench", "rlhf"]
    assert {"model=r/grpo/model", "run_dir=r/judge", "port=0"} < set(words["judge"])
    found = {stage.name: stage for stage in read([f"--config-dir={tmp_path}", "pipeline=mine", "run_dir=r"]).stages}
    assert found["judge"].after == ("grpo", "fp8", "dpo"), "not before the stage that uses it can start"
    assert found["rlhf"].beside == ("judge",)
    assert "grpo" in found["rlhf"].after, "runs again with another judge"
    assert list(chain(tmp_path, stages, "from=rlhf")) == ["judge", "rlhf"], "a part includes its servers"
    assert list(chain(tmp_path, stages, "from=rlhf", "skip=[judge]")) == ["rlhf"]


def test_evaluations_follow_each_stage_that_makes_a_model(tmp_path: Path) -> None:
    words = chain(tmp_path, CHAIN, "evaluate.evaluate.limit=3", evaluate=["suite=quick"])

    assert list(words)[:4] == ["pretrain", "evaluate_pretrain", "sft", "evaluate_sft"]
    assert "evaluate_export" not in words, "the same weights"
    assert {"model=r/dpo/model", "run_dir=r/evaluate_dpo", "suite=quick", "evaluate.limit=3"} < set(
        words["evaluate_dpo"]
    )
    assert not [name for name in chain(tmp_path, CHAIN) if name.startswith("evaluate_")]
    text = chain(tmp_path, CHAIN, "evaluate=suite=quick evaluate.limit=3")  # as on a command line
    assert set(text["evaluate_dpo"]) == set(words["evaluate_dpo"])


def test_the_part_from_a_stage_to_another(tmp_path: Path) -> None:
    def names(*words: str) -> list[str]:
        return list(chain(tmp_path, CHAIN, *words, evaluate=["suite=quick"]))

    assert names("from=export", "to=grpo") == ["export", "grpo", "evaluate_grpo"]
    assert names("to=sft", "skip=[evaluate_pretrain]") == ["pretrain", "sft", "evaluate_sft"]
    assert names("to=sft", "skip=[pretrain]") == ["sft", "evaluate_sft"], "no model to evaluate"
    for word, said in (
        ("from=sfd", "from=sfd: no such stage: did you mean 'sft'"),
        ("to=sft", "from=grpo, to=sft and skip select no stage"),
    ):
        with pytest.raises(ValueError, match=said):
            names("from=grpo", word) if word.startswith("to") else names(word)


def test_a_child_of_puzzle_is_handed_over(tmp_path: Path) -> None:
    stages = {
        "parent": {"job": "convert", "words": ["to=${run_dir}/parent_model"]},
        "child": {"job": "puzzle", "parent": "parent", "words": ["run_dir=${run_dir}/puzzle"]},
        "kd": {"job": "train", "parent": "child"},
        "export": {"job": "convert", "parent": "child", "words": ["to=${run_dir}/hf"]},
    }

    words = chain(tmp_path, stages)
    assert "puzzle.parent=r/parent_model" in words["child"]
    assert "megatron.pretrained_checkpoint=r/puzzle/child/model" in words["kd"]
    assert "from=r/puzzle/fast/model" in chain(tmp_path, stages, "child.puzzle.child=fast")["export"]
    stages["kd"]["job"] = "rl"
    with pytest.raises(ValueError, match=r"kd.parent=child: rl needs a Hugging Face folder"):
        chain(tmp_path, stages)


def test_a_model_is_not_written_where_the_starts_are_recorded(tmp_path: Path) -> None:
    stages = {"parent": {"job": "convert", "words": ["to=${run_dir}/parent"]}}
    with pytest.raises(ValueError, match=r"parent: to=r/parent is where .* to=\$\{run_dir\}/parent_model"):
        chain(tmp_path, stages)


def test_more_replaces_words(tmp_path: Path) -> None:
    stages = {
        "a": {"job": "train", "words": ["recipe=olmo1/1b", "data=mock"], "more": ["data=local_text", "scale=laptop"]}
    }

    words = chain(tmp_path, stages, "a.scale=as_recipe")["a"]
    assert words[-3:] == ("recipe=olmo1/1b", "data=local_text", "scale=as_recipe")


def test_a_scale_without_a_twin_is_named() -> None:
    with pytest.raises(
        ValueError, match="pipeline=puzzle has no variant of that scale; available: domyn_small with scale=laptop"
    ):
        read(["pipeline=puzzle", "scale=laptop"])


@pytest.mark.parametrize(
    "twin",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "domyn_small")) for path in TWINS],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_a_twin_is_complete(twin: Path) -> None:
    """Every key is set, every stage of the original exists, and the inputs of each are outputs of earlier ones."""
    pipeline = read([f"pipeline={twin.stem}", f"scale={twin.parent.name}", "run_dir=r", "evaluate=null"])
    original = yaml.safe_load((twin.parents[1] / twin.name).read_text())["stages"]
    configs = {stage.name: compose(stage.job, stage.own) for stage in pipeline.stages}

    assert original.keys() <= {stage.name for stage in pipeline.every}
    for stage in pipeline.stages:
        before = [place for each in pipeline.before(stage) for place in makes(each.job, configs[each.name])]
        for entry in find(stage.job).inputs(configs[stage.name]):
            assert will_exist(entry.path, before), f"{stage.name}: {entry.key}={entry.path}"
