"""`nemo-ext describe`: models, recipes in their layout, pictures, and what it says when something does not fit."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nemo_ext.describe import describe, model_figures
from nemo_ext.job.config import compose
from nemo_ext.megatron.arguments import pattern_with_cuts
from tests.composing import RECIPES

ONE_EACH = {recipe.split("/")[0]: recipe for recipe in RECIPES}.values()
"""A recipe of each family."""


def figures(*overrides: str) -> dict:
    return model_figures(compose("describe", overrides))


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`nemo-ext describe` in this process, in the folder `tmp_path`: its exit code, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)
    return functools.partial(command, "describe", cwd=tmp_path)


def svg_height(path: Path) -> float:
    return float(ElementTree.parse(path).getroot().attrib["height"].removesuffix("pt"))


# A model alone


def test_a_model_alone_has_its_published_figures_and_no_layout() -> None:
    nano = figures("model=nemotron3_nano_30b")

    assert nano["total_params"] == pytest.approx(31.6e9, rel=0.01)
    assert nano["active_params"] == pytest.approx(3.2e9, rel=0.01)
    assert nano["active_params_with_embedding"] == pytest.approx(3.6e9, rel=0.01)
    assert nano["kv_bytes_per_token"] == 6 * 2 * 2 * 128 * 2  # six blocks, keys and values, two KV heads, bf16
    assert nano["state_bytes_per_sequence"] > 0
    assert nano["train_flops_per_token"] == pytest.approx(3 * nano["forward_flops_per_token"], rel=1e-9)
    assert len(nano["blocks"]) == 52
    assert "gpus" not in nano
    assert nano["recipe"] is None


def test_the_tiny_model_is_the_default() -> None:
    assert figures()["name"] == "nemotron3_nano_tiny"


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ((), 8192),
        (("megatron.max_position_embeddings=1024",), 1024),
        (("megatron.max_position_embeddings=1024", "megatron.seq_length=512"), 512),
        (("megatron.seq_length=512", "seq_length=64"), 64),
        (("recipe=olmo1/7b",), 2048),
        (("recipe=olmo1/7b", "seq_length=64"), 64),
    ],
)
def test_the_sequence_length_is_the_users_then_the_models(overrides: tuple[str, ...], length: int) -> None:
    assert figures(*overrides)["seq_length"] == length


def test_a_pattern_and_sizes_of_ones_own_are_described() -> None:
    own = figures('model.pattern="(M*-)x2"', "megatron.hidden_size=384")

    assert [block["kind"] for block in own["blocks"]] == ["M", "*", "-", "M", "*", "-"]
    assert own["hidden_size"] == 384


def test_a_parallel_size_asks_for_a_layout_in_bf16() -> None:
    spread = figures("megatron.tensor_model_parallel_size=2")

    assert spread["layout"]["world_size"] == 2
    assert spread["layout"]["precision"] == "bf16"
    assert len(spread["gpus"]) == 1


# Recipes


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in ONE_EACH else pytest.mark.slow) for name in RECIPES]
)
def test_a_recipe_is_described_as_it_is_trained(recipe: str) -> None:
    training = compose("train", [f"recipe={recipe}"])

    described = figures(f"recipe={recipe}")

    gpus = training["launcher"]["nodes"] * training["launcher"]["nproc_per_node"]
    assert described["recipe"] == recipe
    assert described["name"] == training["model"]["name"]
    assert described["seq_length"] == training["megatron"]["seq_length"]
    assert described["layout"]["world_size"] == gpus
    assert described["pattern"] == pattern_with_cuts(training) or not described["pipeline_cuts"]
    pipeline = training["megatron"]["pipeline_model_parallel_size"]
    assert len(described["gpus"]) == pipeline
    assert len(described["pipeline_cuts"]) == len(described["stages"]) - 1
    assert described["pipeline_cuts_from"] == ("balance" if pipeline > 1 else None)


def test_a_model_beside_a_recipe_takes_the_recipes_layout() -> None:
    own, other = figures("recipe=olmo3/7b_pretrain"), figures("recipe=olmo3/7b_pretrain", "model=olmo1_7b")

    assert (own["name"], other["name"]) == ("olmo3_7b", "olmo1_7b")
    assert own["layout"] == other["layout"]


def test_cuts_of_ones_own_are_kept() -> None:
    cut = figures('model.pattern="M-|M-M-"', "megatron.pipeline_model_parallel_size=2")

    assert cut["pipeline_cuts"] == [2]
    assert cut["pipeline_cuts_from"] == "model.pattern"
    assert [len(stage["layers"]) for stage in cut["stages"]] == [2, 4]


def test_a_recipe_on_a_laptop_is_one_gpu() -> None:
    laptop = figures("recipe=nemotron3_nano/pretrain", "model=nemotron3_nano_tiny", "data=local_text", "scale=laptop")

    assert laptop["layout"]["world_size"] == 1
    assert laptop["seq_length"] == 256


# The command


def test_json_is_alone_on_stdout_and_the_picture_is_drawn(tmp_path: Path) -> None:
    words = ["recipe=olmo3/32b_pretrain", "format=json", "draw=model.svg"]
    process = [sys.executable, "-m", "nemo_ext.cli", "describe", *words]
    result = subprocess.run(process, cwd=tmp_path, capture_output=True, text=True, timeout=240)

    assert result.returncode == 0
    assert json.loads(result.stdout)["name"] == "olmo3_32b"
    assert "model.svg" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.svg"]


def test_pipeline_stages_are_drawn(tmp_path: Path, command: Command) -> None:
    command("draw=whole.svg")
    _, out, _ = command("draw=cut.svg", "megatron.pipeline_model_parallel_size=2")

    assert "cut after blocks" in out
    assert svg_height(tmp_path / "cut.svg") > svg_height(tmp_path / "whole.svg")


def test_the_tables_name_the_option_to_draw_and_write_nothing(tmp_path: Path, command: Command) -> None:
    code, out, err = command("model=nemotron3_nano_30b")

    assert code == 0
    assert "31.58 B" in out
    assert "draw=" in out
    assert err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("draw=model.gif", ".svg, .png"),
        ("draw=nowhere/model.png", "nowhere/model.png"),
        ("model=nemotron9", "nemotron3_nano_30b"),
        ("recipe=olmo3/nope", "recipe=olmo3/nope: no such recipe"),
        ("model.pattern=MEX", "'X'"),
    ],
)
def test_a_mistake_ends_with_code_2_and_says_what_is_wrong(
    word: str, said: str, tmp_path: Path, command: Command
) -> None:
    code, out, err = command(word)

    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("format=xml", "table, json"),
        ("seq_length=0", "seq_length.*0"),
        ("launcher.nodes=many", "launcher.nodes.*many"),
        ("megatron.hidden_size=0", "megatron.hidden_size"),
        ("megatron.tensor_model_parallel_size=5", "tensor_parallel=5"),
        ("megatron.pipeline_model_parallel_size=9", "9 pipeline stages"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_printed(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=said):
        describe(compose("describe", [word]))

    assert capsys.readouterr().out == ""


def test_an_override_without_effect_is_told(command: Command) -> None:
    _, out, err = command("megatron.hidden_sise=64", "megatron.lr=1e-3", "megatron.kv_channels=64", "format=json")

    assert json.loads(out)["hidden_size"] == 192
    assert err.splitlines() == [
        "note: megatron.hidden_sise has no effect on these figures; did you mean megatron.hidden_size?",
        "note: megatron.lr has no effect on these figures",
    ]


def test_help_and_config_are_printed(command: Command) -> None:
    (code, composed, _), (helped_code, helped, _) = command("--cfg=job"), command("--help")

    assert (code, helped_code) == (0, 0)
    assert "hidden_size: 192" in composed
    assert "seq_length" in composed and "seq_length" in helped


def test_describing_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    script = (
        "import sys; from nemo_ext.cli import main\n"
        "main(['describe', 'recipe=llama_nemotron/super_sft'])\n"
        "print(sorted({'torch', 'matplotlib', 'megatron'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert result.stdout.splitlines()[-1] == "[]"
