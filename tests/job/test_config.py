"""Composition: resolvers, overrides, missing values."""

import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_ext.job.config import check_choice, compose, hydra_value, hydra_words, iterations, multiply, run_job


@pytest.mark.parametrize(
    ("tokens", "expected"), [(None, None), (0, 0), (1, 1), (25e12, 993411), (503_316_480_000, 20000)]
)
def test_the_nearest_number_of_iterations_is_chosen(tokens: float | None, expected: int | None) -> None:
    assert iterations(tokens, 8192, 3072) == expected


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        iterations(-1, 8, 8)


def test_a_product_is_an_integer_where_possible() -> None:
    assert multiply(0.05, 100) == 5 and isinstance(multiply(0.05, 100), int)
    assert multiply(0.05, 10) == 0.5


def test_any_megatron_argument_can_be_added_and_a_pattern_needs_no_quotes() -> None:
    config = compose("train", ["megatron.lr_warmup_init=1e-7", "model.pattern=(*{kv=1}-)x2"])

    assert config["megatron"]["lr_warmup_init"] == 1e-7
    assert config["model"]["pattern"] == "(*{kv=1}-)x2"


def test_limits_given_whole_replace_the_recipes() -> None:
    shares = compose("puzzle", ["puzzle.search.shares={parameters: 0.5}"])["puzzle"]["search"]["shares"]
    assert shares == {"parameters": 0.5}
    shares = compose("puzzle", ["puzzle.search.shares.parameters=0.5"])["puzzle"]["search"]["shares"]
    assert shares == {"memory_bytes": 0.6, "attention_blocks": 0.75, "parameters": 0.5}


def test_a_named_item_of_a_list_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["output=o", "sources.mine.path=a.jsonl"]
    message = "sources.mine.path: sources is a list, whose items have no names: set it as a whole, sources=[...]"
    with pytest.raises(ValueError, match=re.escape(message)):
        compose("sft_data", words)

    monkeypatch.setattr(sys, "argv", ["sft_data", *words])
    with pytest.raises(SystemExit, match="2"):
        run_job("sft_data", lambda config: None)
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_missing_item_of_a_list_is_named() -> None:
    with pytest.raises(ValueError, match=r"sources\.0\.name=a: sources has no item 0; set the list as a whole"):
        compose("sft_data", ["output=o", "sources.0.name=a"])


def test_quoted_patterns_are_unchanged() -> None:
    assert hydra_words(["model.pattern='M*'", "run_dir=x"]) == ["model.pattern='M*'", "run_dir=x"]


@pytest.mark.parametrize(
    ("job", "word", "found"),
    [
        ("sft_data", "filters.repetition.ngram=20", {"repetition": {"ngram": 20}}),
        ("sft_data", "filters.narrative={files: n.txt}", {"narrative": {"files": "n.txt"}}),
        ("sft_data", "filters.length.max_tokens=900", {"length": {"max_tokens": 900}}),
        ("sft_data", "filters.language.by_source.news=[de]", {"language": {"by_source": {"news": ["de"]}}}),
        ("sft_data", "filters.repetition=null", {"repetition": None}),
        ("sft_data", "filters={repetition: {ngram: 20}}", {"repetition": {"ngram": 20}}),
        ("sft_data", "filters.structurel={}", {"structurel": {}}),  # which the job refuses, with a suggestion
        ("preference_data", "filters.max_tokens=900", {"max_tokens": 900}),
        ("curriculum", "filters.drop_from=0.5", {"drop_from": 0.5}),
    ],
)
def test_filters_are_set_on_the_command_line(job: str, word: str, found: dict[str, object]) -> None:
    before, after = (compose(job, ["output=o", *words])["filters"] for words in ((), (word,)))

    assert after == before | found


@pytest.mark.parametrize("prefix", ["", "++"])
def test_a_text_is_taken_literally_also_with_a_prefix(prefix: str) -> None:
    words = ["input=i", "output=o", f"{prefix}generate.template=say {{x}}, now"]

    assert compose("generate", words)["generate"]["template"] == "say {x}, now"


def test_a_marked_section_is_replaced_and_others_are_merged() -> None:
    before = compose("sft_data", ["preset=nemotron3_nano", "output=o"])
    after = compose("sft_data", ["preset=nemotron3_nano", "output=o", "packing={capacity: 512}", "sampling={alpha: 1}"])

    assert after["packing"] == {"capacity": 512} != before["packing"]
    assert after["sampling"] == {"alpha": 1} != before["sampling"]


@pytest.mark.parametrize(
    ("error", "resumable", "code", "line"),
    [
        (OSError(28, "no space", "made/train.bin"), True, 1, "error: No space left on device: made/train.bin"),
        (OSError(27, "no name"), False, 1, "error: File too large"),
        (KeyboardInterrupt(), False, 130, "interrupted"),
        (KeyboardInterrupt(), True, 130, "interrupted: the same command resumes"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_a_job_that_fails_ends_with_one_line(
    error: BaseException,
    resumable: bool,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def job(config: dict[str, object]) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["x", "output=o"])

    with pytest.raises(SystemExit) as ended:
        run_job("curriculum", job, resumable=resumable)

    assert (ended.value.code, *capfd.readouterr()) == (code, "", f"{line}\n")


@pytest.mark.parametrize(("before", "during"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_a_job_wait_without_spinning(
    before: str | None, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", before)
    monkeypatch.setattr(sys, "argv", ["x", "output=o"])

    run_job("curriculum", lambda _: None)

    assert os.environ["OMP_WAIT_POLICY"] == during


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
@example("1e5")
@example("null")
@example("a b,c=d")
@example("it's \\'quoted\\\" \\")
def test_any_text_is_a_value(text: str) -> None:
    assert OverridesParser.create().parse_override(f"key={hydra_value(text)}").value() == text


@pytest.mark.parametrize("plain", ["/models/olmo-3_7b.v2", "../runs/mine", "./x", "checkpoints"])
def test_plain_paths_are_not_quoted(plain: str) -> None:
    assert hydra_value(plain) == plain


@pytest.mark.parametrize(
    ("job", "key"),
    [
        ("train", "run_dir"),
        ("train", "megatron.pretrained_checkpoint"),
        ("convert", "from"),
        ("generate", "input"),
        ("rl", "tasks.train.path"),
        ("rl", "model"),
        ("slurm", "slurm.folder"),
        ("pipeline", "start"),  # a key of a pipeline's file
    ],
)
@pytest.mark.parametrize("name", ["runs/lr=1e-3", "a, b (2) #3/x.jsonl", "1e-3", "~/my runs"])
def test_names_of_files_are_taken_literally(job: str, key: str, name: str) -> None:
    if (key, name) == ("start", "1e-3"):
        return  # nothing states that such a key is not a number
    for value in (name, hydra_value(name)):
        word = hydra_words([f"{key}={value}"], job)[-1]
        assert OverridesParser.create().parse_override(word).value() == name


@pytest.mark.parametrize("value", ["[a.jsonl,'b=1.jsonl']", "null", "'a','b'", "a\\=b", "{kind: byte}"])
def test_lists_and_quoted_values_are_left_to_hydra(value: str) -> None:
    (word,) = hydra_words([f"input={value}"], "tokenize")

    assert word.lstrip("+") == f"input={value}"


@pytest.mark.parametrize("job", ["convert", "merge", "generate", "synthesize"])
def test_a_dry_run_is_spelled_the_same_for_every_job(job: str) -> None:
    words = ["from=x", "to=y"] if job in ("convert", "merge") else ["input=x", "output=y"]
    config = compose(job, ["--dry-run", *words])

    assert (config if "dry_run" in config else config[job])["dry_run"] is True


def test_missing_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"train\.tokens"):
        compose("train", ["train.tokens=???"])


@pytest.mark.parametrize(
    ("job", "word", "said"),
    [
        ("tokenize", "data=local_txt", "data=local_txt: no such data: did you mean 'local_text'? known: "),
        ("train", "precision=x", "precision=x: no such precision: known: auto, bf16, "),
        ("curate", "preset=mine", "preset=mine: no such preset: known: dolma, "),
    ],
)
def test_a_missing_file_of_a_group_is_one_line(job: str, word: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}[^\\n]*$"):
        compose(job, [word])


def test_a_missing_recipe_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'nemotron3_nano/pretrain'"):
        check_choice("recipe", ["recipe=nemotron3_nano/pretrian"])


def test_a_users_recipe_may_be_a_link_and_quoted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mine.yaml").write_text("# @package _global_\n")
    (tmp_path / "own/recipe").mkdir(parents=True)
    (tmp_path / "own/recipe/link").symlink_to(tmp_path / "elsewhere")

    for word in ("recipe=link/mine", "recipe='link/mine'", "recipe=link/mine.yaml"):
        check_choice("recipe", [f"--config-dir={tmp_path / 'own'}", word])
    with pytest.raises(ValueError, match="no such recipe"):
        check_choice("recipe", [f"--config-dir={tmp_path / 'own'}", "recipe=link/yours"])


def test_the_recipe_wins_over_the_model_and_the_command_line_over_both() -> None:
    assert compose("train", ["recipe=domyn_small/cpt"])["megatron"]["rotary_base"] == 500_000
    assert compose("train", ["recipe=domyn_small/cpt", "megatron.rotary_base=7"])["megatron"]["rotary_base"] == 7
    assert compose("train", ["recipe=domyn_small/cpt", "model=domyn_small_tiny"])["model"]["name"] == "domyn_small_tiny"


def test_sources_of_preference_data_compose_as_in_the_command() -> None:
    """`nemo-ext submit` and pipelines compose the same words as `nemo-ext preference_data`."""
    words = ["preset=domyn", "output=x", "sources={own: {kind: judged, path: a}}", "sources.own.limit=3"]

    assert compose("preference_data", words)["sources"] == {"own": {"kind": "judged", "path": "a", "limit": 3}}


def test_a_phase_uses_a_blend_of_config_dir_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    blend = {"data": {"directory": "${data_root}/own", "streams": [{"name": "web", "weight": 1}]}}
    (tmp_path / "data" / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(blend))
    words = ["recipe=nemotron3_nano/pretrain", "phases.high_quality.data=own", "data_root=d"]

    config = compose("train", [f"--config-dir={tmp_path}", *words])

    assert config["phases"]["high_quality"]["data"]["directory"] == "d/own"
