"""Errors of a stage that are found before its dependencies have made its files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nemo_ext.job.config import compose
from nemo_ext.pipeline.stages import read
from nemo_ext.pipeline.submit import _other_tokenizers
from nemo_ext.slurm.jobs import makes
from nemo_ext.slurm.preflight import findings
from nemo_ext.slurm.settings import settings_of
from nemo_ext.slurm.submit import Submission, planned

Chain = Callable[[str, str], list[str]]


@pytest.fixture
def wrong(tmp_path: Path) -> Chain:
    """Errors of a chain's second stage, by the arguments of both stages."""
    (tmp_path / "a.md").write_text("text")

    def errors(tokenize: str, pretrain: str) -> list[str]:
        words = [f"pipeline=quickstart run_dir={tmp_path}/r data_root={tmp_path}/data cluster=testbed skip=[export]"]
        given = [f"tokenize.{word}" for word in tokenize.split()] + [f"pretrain.{word}" for word in pretrain.split()]
        pipeline = read([*words[0].split(), *given])
        submissions: dict[str, Submission] = {}
        problems: Sequence[object] = ()
        for stage in pipeline.stages:
            before = pipeline.before(stage)
            coming = [
                place
                for each in before
                for config in submissions[each.name].configs
                for place in makes(submissions[each.name].settings.job, config)
            ]
            made = submissions[stage.name] = planned(stage.words, coming=coming)
            problems = [
                *findings(made.config, made.settings, coming=coming),
                *_other_tokenizers(before, submissions, made),
            ]
        return [one.text for one in problems if one.kind == "error"]

    return errors


def test_a_chain_that_fits_together_has_no_errors(wrong: Chain) -> None:
    assert wrong("", "") == []


@pytest.mark.parametrize(
    ("tokenize", "pretrain", "said"),
    [
        ("", "megatron.padded_vocab_size=128", "the tokenizer has 257 ids, but the model has 128 "),
        ("", "data.tokenizer.kind=byt", "unknown tokenizer kind 'byt'"),
        ("", "data.tokenizer=null", "data.tokenizer must be a mapping"),
        ("tokenizer={tok}", "", "code is tokenised with"),
    ],
)
def test_a_tokenizer_mismatch_is_found_before_tokenising(
    wrong: Chain, tokenize: str, pretrain: str, said: str, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"</s>": 0, "a": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))

    errors = wrong(tokenize.replace("{tok}", f"{tmp_path}/tokenizer.json"), pretrain)

    assert [text for text in errors if said in text], errors


def test_the_tokenizer_of_pairs_may_come_from_an_earlier_stage(tmp_path: Path) -> None:
    words = [
        "output=p",
        "sources={own: {kind: pairs, path: a.jsonl}}",
        f"tokenizer={{kind: huggingface, path: {tmp_path}/t}}",
    ]
    config, settings = compose("preference_data", words), settings_of(["job=preference_data"])

    assert [one.text for one in findings(config, settings, here=True) if one.kind == "error"]
    assert not [
        one.text for one in findings(config, settings, coming=[tmp_path / "t"], here=True) if one.kind == "error"
    ]
