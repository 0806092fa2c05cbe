"""Settings that an older Megatron-Core does not have are refused by name and version."""

from pathlib import Path

import pytest

from nemo_ext.job.config import compose
from nemo_ext.megatron import check, versions
from nemo_ext.puzzle import job


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: (0, 18, 2))


def test_the_version_is_read_from_the_source(megatron: None) -> None:
    import megatron.core

    assert megatron.core.__version__.startswith(versions.spelled(versions.installed()))
    assert versions.lack(["logits_save_dir", "yarn_beta_fast", "dataloader_inter_document_masking"]) is None


def test_features_missing_from_an_older_version_are_named(older: None) -> None:
    assert (
        versions.lack(["lr", "yarn_beta_fast"])
        == "YaRN in hybrid models came with Megatron-Core 0.19, but 0.18.2 is installed"
    )
    assert versions.lack(["lr", "tensor_model_parallel_size"]) is None


@pytest.mark.parametrize("word", ["position_embedding_type=yarn", "moe_use_upcycling=true", "logits_save_top_p=0.9"])
def test_values_missing_from_an_older_version_are_named(older: None, word: str) -> None:
    config = compose("train", ["data=mock", "run_dir=unused", f"megatron.{word}"])

    said = rf"megatron\.{word.split('=')[0]}=.* is not supported: .* came with Megatron-Core 0\.19"
    with pytest.raises(versions.TooOld, match=said):
        check.check_version(config)


def test_an_unsupported_setting_is_refused_before_anything_starts(older: None) -> None:
    words = ["data=local_text", "run_dir=unused", "+data.mixed_lengths={short: 64, document_boundaries: true}"]

    with pytest.raises(
        ValueError, match=r"document_boundaries is .*: .* came with Megatron-Core 0\.19, but 0\.18\.2 is installed"
    ):
        check.check_version(compose("train", words))


def test_a_teacher_in_files_is_refused_before_the_first_stage(older: None, tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path / 'run'}", "puzzle.heal.teacher=cached", "puzzle.heal.top_k=8"]

    with pytest.raises(ValueError, match=r"puzzle\.heal\.teacher=cached is .*: .* came with Megatron-Core 0\.19"):
        job.run(compose("puzzle", words))

    assert not list(tmp_path.iterdir())
