"""Records of finished stages and of their inputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.puzzle.settings import settings
from nemo_ext.puzzle.workspace import STAGES, Workspace


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Workspace]:
    run_dir = tmp_path / "a_run_directory_whose_path_is_too_long_to_be_shown_whole_in_a_line_that_says_what_differs"
    checkpoint = run_dir / "parent" / "checkpoints" / "iter_0000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_text("weights")
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("3")

    def make(*overrides: str) -> Workspace:
        config: dict[str, Any] = compose("puzzle", ["data=mock", f"run_dir={run_dir}", *overrides])
        return Workspace(config, settings(config["puzzle"]))

    return make


def test_stages_come_after_their_dependencies() -> None:
    order = list(STAGES)
    assert all(order.index(need) < order.index(stage) for stage, needs in STAGES.items() for need in needs)


def test_a_stage_is_finished_only_with_the_same_settings(opened: Callable[..., Workspace]) -> None:
    assert not opened().is_finished("parent")
    for stage in ("parent", "library", "distill"):
        opened().finish(stage)
    assert opened().is_finished("distill")
    assert opened("puzzle.heal.lr=3").is_finished("distill")  # settings of other stages do not matter
    assert opened("puzzle.distill.inputs=there").is_finished("distill")
    with pytest.raises(ValueError, match=r"distill was done with other settings \(distill\.steps: 100 -> 7\)"):
        opened("puzzle.distill.steps=7").is_finished("distill")
    with pytest.raises(ValueError, match=r"parent .* other settings \(megatron\.lr: 0\.002 -> 1\).*another run_dir"):
        opened("megatron.lr=1").is_finished("parent")


def test_replaced_results_make_later_stages_stale(opened: Callable[..., Workspace]) -> None:
    for stage in ("parent", "library", "distill"):
        opened().finish(stage)
    opened("puzzle.variants.no_op=false").finish("library")
    with pytest.raises(ValueError, match="distill was done from results that have been replaced since"):
        opened("puzzle.variants.no_op=false").is_finished("distill")


def test_a_library_from_before_latent_widths_is_continued(opened: Callable[..., Workspace]) -> None:
    opened().finish("parent")
    opened().finish("library")
    record = opened().blocks / "stages/library.json"
    record.write_text(record.read_text().replace('"latent": [],', ""))
    assert '"latent"' not in record.read_text()
    assert opened("puzzle.variants.latent=[]").is_finished("library")
    with pytest.raises(ValueError, match=r"library was done with other settings \(variants\.latent"):
        opened("puzzle.variants.latent=[0.5]").is_finished("library")


def test_a_parent_from_before_new_train_settings_is_continued(opened: Callable[..., Workspace]) -> None:
    opened().finish("parent")
    record = opened().record("parent")
    made = json.loads(record.read_text())
    assert made["settings"]["train"].pop("mtp_only") is False
    record.write_text(json.dumps(made))
    assert opened().is_finished("parent")
    with pytest.raises(ValueError, match=r"parent was done with other settings \(train\.mtp_only: null -> true\)"):
        opened("train.mtp_only=true").is_finished("parent")


def test_block_inputs_belong_to_one_distillation(opened: Callable[..., Workspace]) -> None:
    shard = ("puzzle.stages=[distill]", "puzzle.shard=1/2")
    others = (("puzzle.distill.batch=6",), ("puzzle.distill.lr=1",), shard, ("puzzle.variants.no_op=false",))

    def places() -> list[Path]:
        return [opened(*words).block_inputs("there") for words in ((), *others)]

    before = places()
    assert {each.parent for each in before} == {Path("there")}
    assert len({*before}) == len(before) - 1, "variants count through the library"
    assert before[0] == opened("puzzle.distill.inputs=there", "puzzle.heal.lr=3").block_inputs("there")
    opened("puzzle.variants.no_op=false").finish("library")
    assert not {*places()} & {*before}


def test_children_share_the_library(opened: Callable[..., Workspace]) -> None:
    for stage in STAGES:
        opened().finish(stage)
    other = opened("puzzle.child=faster", "puzzle.search.shares.parameters=0.4", "puzzle.serving.batch=7")
    assert other.is_finished("score")
    assert not other.is_finished("cost") and not other.is_finished("search")
    with pytest.raises(ValueError, match=r"search was done with other settings.*give the child another name"):
        opened("puzzle.search.shares.parameters=0.4").is_finished("search")


def test_missing_needs_are_named(opened: Callable[..., Workspace]) -> None:
    assert opened().missing("search") == ["score", "cost"]


def test_the_newest_checkpoint_of_a_child(opened: Callable[..., Workspace]) -> None:
    made = opened()
    made.link()
    assert not made.model.is_symlink(), "there is no child yet"
    for folder in (made.weights, made.fused, made.healed / "checkpoints", made.pretrained / "checkpoints"):
        folder.mkdir(parents=True)
        made.link()
        assert made.model.resolve() == made.newest().resolve()
        assert made.newest() == (folder.parent if folder.name == "checkpoints" else folder)
    assert made.realised() == made.fused


def test_a_begun_stage_resumes_only_with_the_same_settings(opened: Callable[..., Workspace]) -> None:
    opened().finish("parent")
    opened().finish("library")
    opened().begin("distill")
    assert not opened().is_finished("distill")
    with pytest.raises(ValueError, match=r"distill was begun with other settings \(distill\.steps: 100 -> 7\)"):
        opened("puzzle.distill.steps=7").is_finished("distill")
    opened().finish("distill")
    assert opened().is_finished("distill")


def test_a_stage_that_had_nothing_to_do_may_be_enabled_later(opened: Callable[..., Workspace]) -> None:
    for stage in STAGES:
        opened("puzzle.heal.tokens=0").finish(stage, empty=stage in ("heal", "pretrain", "export"))
    with_healing = opened("puzzle.heal.tokens=4096", "puzzle.export=true")
    assert not with_healing.is_finished("heal") and not with_healing.is_finished("export")
    with_healing.finish("heal")
    assert not with_healing.is_finished("pretrain")
    with_healing.finish("pretrain", empty=True)
    assert not with_healing.is_finished("evaluate")  # stages that only report run again
    with pytest.raises(ValueError, match=r"heal was done with other settings \(heal\.tokens: 4096\.0 -> 0\.0"):
        opened("puzzle.heal.tokens=0").is_finished("heal")


def test_further_training_and_other_pictures_need_no_other_child(opened: Callable[..., Workspace]) -> None:
    for stage in STAGES:
        opened().finish(stage, empty=stage == "pretrain")
    more = opened("puzzle.heal.continue_tokens=4096", "puzzle.search.sweep.points=3", "megatron.save_interval=7")
    assert all(more.is_finished(stage) for stage in ("parent", "search", "heal"))
    assert not more.is_finished("pretrain") and not more.is_finished("front")


def test_a_parent_that_changed_is_noticed(opened: Callable[..., Workspace]) -> None:
    opened().finish("parent")
    assert opened().is_finished("parent")
    checkpoints = opened().parent / "checkpoints"
    (checkpoints / "iter_0000003").rename(checkpoints / "iter_0000004")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(ValueError, match=r"the parent .* has changed since .*iter_0000003.* -> .*iter_0000004"):
        opened().is_finished("parent")


def test_a_removed_record_makes_later_stages_stale(opened: Callable[..., Workspace]) -> None:
    for stage in ("parent", "library", "distill"):
        opened().finish(stage)
    opened().record("library").unlink()
    with pytest.raises(ValueError, match="distill was done from results that have been replaced since"):
        opened().is_finished("distill")
