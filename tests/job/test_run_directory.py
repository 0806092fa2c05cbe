"""The files of a run."""

import json
from pathlib import Path

import pytest

from nemo_ext.job import run_directory
from nemo_ext.job.files import only_run_in


def test_a_config_is_read_back_unchanged(tmp_path: Path) -> None:
    config = {"model": {"pattern": "M*|E-"}, "megatron": {"lr": 1e-05, "swiglu": True, "data_cache_path": None}}

    assert run_directory.read_config(run_directory.write_config(tmp_path, config)) == config


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.yaml: no such config"):
        run_directory.read_config(tmp_path / "config.yaml")


def test_a_damaged_line_is_named_unless_it_is_the_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert run_directory.read_metrics(path) == [{"step": 1}]

    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected a line of metrics"):
        run_directory.read_metrics(path)


def test_the_last_checkpoint_is_the_one_that_megatron_names(tmp_path: Path) -> None:
    assert run_directory.last_checkpoint(tmp_path) is None

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("15\n")

    assert run_directory.last_checkpoint(tmp_path) == 15


def test_versions_name_the_software_that_ran(tmp_path: Path) -> None:
    run_directory.write_versions(tmp_path, ["nemo-ext train", "megatron.lr=1"])

    facts = json.loads((tmp_path / "versions.json").read_text())
    assert facts["packages"]["megatron-core"].startswith("0.")
    assert facts["command"] == ["nemo-ext train", "megatron.lr=1"]


def test_a_second_run_in_a_directory_is_refused(tmp_path: Path) -> None:
    first, second = (only_run_in(tmp_path / "made", "output") for _ in range(2))

    with first, pytest.raises(ValueError, match=r"choose output=\.\.\."), second:
        pass

    with only_run_in(tmp_path / "made", "output"):
        pass


def test_a_directory_that_cannot_be_made_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ValueError, match=r"^output=.*file: "), only_run_in(tmp_path / "file", "output"):
        pass
