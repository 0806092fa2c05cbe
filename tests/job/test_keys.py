"""Keys whose values name files or folders."""

import re
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from nemo_ext.job.keys import choices, description, is_marked, is_place, may_be_new, names
from nemo_ext.job.registry import commands, grammar_of
from nemo_ext.job.settings import REPLACED, TEXT, WORDS
from nemo_ext.megatron.arguments import MANAGED, megatron_parser

_NAME = re.compile(r"(\w*_)?(dir|directory|path|file|folder|root|input|output)")


@pytest.mark.parametrize(
    ("job", "key"),
    [
        ("curate", "curate.blocks.english.models.en"),
        ("compare", "runs"),
        ("evaluate", "evaluate.judge.endpoint"),
        ("puzzle", "puzzle.distill.inputs"),
        ("preference_data", "sources.chat.path"),
        ("rl", "rl.environments.judge.settings.judge.endpoint"),
        ("sft_data", "filters.narrative.files"),
        ("synthesize", "roles.teacher.endpoint"),
        ("train", "phases.anneal.data.directory"),
    ],
)
def test_keys_are_found_below_sections(job: str, key: str) -> None:
    assert is_place(grammar_of(job).settings, key)


@pytest.mark.parametrize("key", ["train.tokens", "megatron.lr", "model.pattern", "evaluate.every", "puzzle", "no.key"])
def test_other_keys_are_not_paths(key: str) -> None:
    assert not is_place(grammar_of("train").settings, key)


@pytest.mark.parametrize("job", [each.config or each.name for each in commands() if each.grammar.settings])
def test_path_keys_are_known_by_their_name(job: str) -> None:
    with initialize_config_module("hydra_conf", version_base="1.3"):
        config = OmegaConf.to_container(compose(job), resolve=False)
    settings = grammar_of(job).settings

    assert not [key for key in _keys(config) if _NAME.fullmatch(key.rpartition(".")[2]) and not is_place(settings, key)]


def test_paths_among_megatrons_flags_are_known() -> None:
    settings = grammar_of("train").settings
    flags = [flag for flag in megatron_parser()._actions if flag.type is str and flag.dest not in MANAGED]

    assert not [
        flag.dest for flag in flags if _NAME.fullmatch(flag.dest) and not is_place(settings, f"megatron.{flag.dest}")
    ]


def _keys(config: object, above: str = "") -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield f"{above}{key}"
            yield from _keys(value, f"{above}{key}.")


@pytest.mark.parametrize(
    ("job", "key", "mark"),
    [
        ("generate", "generate.template", TEXT),
        ("generate", "generate.extra", REPLACED),
        ("mixture", "train", WORDS),
        ("preference_data", "sources", REPLACED),
        ("sft_data", "packing", REPLACED),
    ],
)
def test_marks_are_found_below_sections_and_flat_fields(job: str, key: str, mark: str) -> None:
    assert is_marked(grammar_of(job).settings, key, mark)


@pytest.mark.parametrize(
    ("job", "key", "new"),
    [
        ("train", "megatron.optimizer", True),
        ("train", "evaluate.attempts", True),
        ("train", "train.token", False),
        ("generate", "generate.attempts", True),
        ("generate", "generate.client", False),
        ("rl", "trl.beta", True),
    ],
)
def test_keys_of_classes_and_of_open_sections_may_be_new(job: str, key: str, new: bool) -> None:
    assert may_be_new(grammar_of(job).settings, key) == new


def test_a_key_has_its_line_and_its_choices() -> None:
    settings = grammar_of("generate").settings

    assert description(settings, "generate.max_dead").startswith("share of failed answers")
    assert description(settings, "generate.attempts") == "maximum number of attempts per request."
    assert choices(settings, "serving.engine") == ("transformers", "vllm")


def test_classes_name_their_keys_with_those_of_flat_fields() -> None:
    assert {"every", "suite", "attempts"} <= set(names(grammar_of("train").settings, "evaluate"))
    assert "client" not in names(grammar_of("train").settings, "evaluate")


def test_a_class_that_cannot_be_imported_accepts_any_key() -> None:
    settings = {"section": "no_such_package.settings:Settings"}

    assert may_be_new(settings, "section.key")
    assert description(settings, "section.key") == ""
