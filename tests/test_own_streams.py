"""`streams=...` in place of the data of every recipe: a list or a tree, as a word, in files and in pipelines."""

from pathlib import Path
from typing import Any

import pytest

import hydra_conf
from nemo_ext.data.blends.blend import flattened
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.job.config import compose
from nemo_ext.pipeline.stages import read
from nemo_ext.slurm.submit import planned

RECIPES = Path(hydra_conf.__file__).parent / "recipe"
NAMES = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.yaml"))
ONE_EACH = {name.split("/")[0]: name for name in NAMES}.values()
TREE = "streams={web: 3, code: {share: 1, of: {python: 1, rust: 1}}}"


def leaves(config: dict[str, Any]) -> list[tuple[str, str]]:
    assert "streams" not in config
    assert not [name for name, phase in (config.get("phases") or {}).items() if phase.get("data")]
    assert flattened(config["data"])["tokenizer"]["kind"] in ("byte", "huggingface")
    return [(leaf.name, str(leaf.prefix)) for leaf in read_tree(config["data"]).leaves()]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in ONE_EACH else pytest.mark.slow) for name in NAMES if name != "model_alone"],
)
def test_own_streams_replace_the_data_of_every_recipe(recipe: str) -> None:
    job = "puzzle" if recipe.startswith("puzzle/") else "train"
    given = [f"recipe={recipe}", "data_root=/mine"]
    words = (
        [*given, "data.tokenizer.path=/t"]
        if (compose(job, given)["data"].get("tokenizer") or {}).get("path")
        else given
    )
    if compose(job, given)["data"].get("tokenizer") is None:
        with pytest.raises(
            ValueError, match=r"streams requires a tokenizer, and this recipe does not name one; add .*data\.tokenizer="
        ):
            compose(job, [*words, TREE])
        words = [*words, "data.tokenizer={kind: huggingface, path: /t}"]

    tree = leaves(compose(job, [*words, TREE]))
    flat = leaves(compose(job, [*words, "streams=[{name: web, weight: 1}, {name: b, weight: 1, prefix: /else/b}]"]))

    assert tree == [("web", "/mine/web"), ("python", "/mine/python"), ("rust", "/mine/rust")]
    assert flat == [("web", "/mine/web"), ("b", "/else/b")]


@pytest.mark.parametrize("below", ["nemotron3_nano/quickstart_phases", "olmo1/1b"])
def test_own_streams_stand_in_files_and_the_last_word_counts(below: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = (
        f"# @package _global_\ndefaults:\n  - /recipe/{below}\n  - _self_\nrecipe: mine\nstreams: {{web: 1, code: 1}}\n"
    )
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    words = [f"--config-dir={tmp_path}", "recipe=mine"]

    assert [name for name, _ in leaves(compose("train", words))] == ["web", "code"]
    assert leaves(compose("train", [*words, "streams={other: 1}"])) == [("other", "data/other")]
    assert leaves(compose("train", [*words, "streams=[{name: b, weight: 1}]"])) == [("b", "data/b")]


def test_a_pipeline_of_one_s_own_as_the_documentation_has_it(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "pipelines.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "mine.yaml").write_text(example)

    pipeline = read([f"--config-dir={tmp_path}", "pipeline=mine", "corpus=a.jsonl", "data_root=/mine", "run_dir=r"])
    stages = {stage.name: planned(stage.words) for stage in pipeline.stages}

    assert stages["tokenize"].config["output"] == "/mine/mine"
    assert leaves(dict(stages["pretrain"].config)) == [("mine", "/mine/mine")]
    (tokenizer,) = (dict(stage.config)["data"]["tokenizer"] for name, stage in stages.items() if name == "pretrain")
    assert stages["tokenize"].config["tokenizer"] == tokenizer["path"]


def test_tokenize_and_blend_take_the_same_words() -> None:
    source = "streams=[{name: a, weight: 1, source: {kind: text, path: a.md}}]"
    for job in ("tokenize", "blend"):
        (leaf,) = read_tree(compose(job, [source, "data_root=/mine"])["data"]).leaves()
        assert (leaf.name, str(leaf.prefix), leaf.source) == ("a", "/mine/a", {"kind": "text", "path": "a.md"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([TREE, "data=mock"], "streams and data=mock cannot be combined"),
        (
            [TREE, "data.directory=x"],
            r"data\.directory applies only to the recipe's data; for streams, set data_root",
        ),
    ],
)
def test_what_does_not_go_with_own_streams_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compose("train", words)
