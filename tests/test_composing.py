"""Configs that tests compose are Hydra's own, though parts of them are kept."""

from pathlib import Path

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from nemo_ext.job.config import compose
from tests import composing

WORDS = (
    ("train",),
    ("train", "recipe=nemotron3_nano/quickstart", "megatron.hidden_size=96"),
    ("train", "recipe=nemotron3_nano/quickstart", "precision=fp32", "+megatron.new_key=2"),
    ("train", "megatron.hidden_size=96", "recipe=nemotron3_nano/quickstart"),
    ("train", "recipe=domyn_small/sft", "operation=cluster", "~megatron.clip_grad"),
    ("rl", "preset=rl_zero", "model=m"),
)


def test_what_is_kept_changes_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compose.__wrapped__  # type: ignore[attr-defined]  # which keeps no whole config
    kept = [whole(job, words) for _ in range(2) for job, *words in WORDS]
    create, merge = composing.PLAIN
    monkeypatch.setattr(config_loader_impl, "create_defaults_list", create)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge)

    assert [whole(job, words) for job, *words in WORDS] * 2 == kept


def test_files_of_the_user_are_read_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe" / "mine.yaml"
    recipe.parent.mkdir()
    for hidden in (64, 96):
        recipe.write_text(
            f"# @package _global_\ndefaults: [nemotron3_nano/quickstart]\nmegatron: {{hidden_size: {hidden}}}\n"
        )
        config = compose("train", [f"--config-dir={tmp_path}", "recipe=mine"])
        assert config["megatron"]["hidden_size"] == hidden
