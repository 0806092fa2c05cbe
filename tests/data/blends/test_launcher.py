import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nemo_ext
from nemo_ext.data.blends.job import audit
from nemo_ext.job.config import compose
from tests.composing import RECIPES

ROOT = Path(nemo_ext.__file__).parents[1]
SCRIPT = """
import sys
sys.modules["torch"] = None
from nemo_ext.cli import main
main(["blend", *sys.argv[1:]])
"""


Command = Callable[..., Any]


@pytest.fixture
def blend(command: Command) -> Command:
    """Run the job in this process."""
    return partial(command, "blend")


def rows(output: str) -> dict[str, list[str]]:
    """Rows of the printed table: name -> the other words of the row."""
    return {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}


def test_the_job_does_not_import_torch(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", SCRIPT, "data.directory=d", "data.blend={a: 1}"]

    shown = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert rows(shown.stdout)["a"][:2] == ["100", "%"]


def test_help_explains_every_key(tmp_path: Path, blend: Command) -> None:
    helped = blend("--help", cwd=tmp_path)

    assert (helped.returncode, helped.stderr) == (0, "")
    for key in ("data", "recipe", "tokens", "output", "max_epochs", "refuse_epochs", "require_files"):
        assert f"\n  {key} " in helped.stdout, f"{key} is not explained"


def test_a_blend_of_the_package(tmp_path: Path, blend: Command) -> None:
    shown = blend("data=domyn_foundation", "tokens=9e12", "output=out", cwd=tmp_path)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Blend of domyn_foundation (9,000,000,000,000 tokens)")
    assert rows(shown.stdout)["multilingual"] == ["15", "%", "1.35", "T", "?", "?"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "blend.json",
        "blend.png",
        "blend.txt",
        "nemo_paths.json",
        "report.md",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing of Hydra's"


def test_a_recipe_sets_its_blend_and_length(tmp_path: Path, blend: Command) -> None:
    own = blend("recipe=domyn_small/cpt", cwd=tmp_path)
    other = blend("recipe=domyn_small/cpt", "data=domyn_foundation", "tokens=1e12", cwd=tmp_path)

    assert own.stdout.startswith("Blend of domyn_small/cpt, domyn_cpt (503,316,480,000 tokens)")
    assert other.stdout.startswith("Blend of domyn_small/cpt, domyn_foundation (1,000,000,000,000 tokens)")


def test_phases_with_separate_data_are_separate_blends(tmp_path: Path, blend: Command) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/late.yaml").write_text(
        "# @package _global_\ndata: {directory: d, tokenizer: {kind: byte}, blend: {a: {share: 1, tokens: 10}, b: 1}}\n"
    )
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(
        "# @package _global_\n"
        "recipe: mine\n"
        "data: {directory: d, tokenizer: {kind: byte}, blend: {a: {share: 1, tokens: 10}}}\n"
        "train: {tokens: 60}\n"
        "phases: {first: {tokens: 10}, second: {tokens: 20}, third: {tokens: 30, data: late}}\n"
    )

    shown = blend("--config-dir", ".", "recipe=mine", "output=out", cwd=tmp_path)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "Blend of mine, first+second (30 tokens)\n" in shown.stdout
    assert "Blend of mine, third (30 tokens)\n" in shown.stdout
    assert (
        "warning: some streams are read more than max_epochs times over all phases together: a 4.5 times"
        in shown.stdout
    )
    assert (tmp_path / "out/first+second/blend.txt").read_text() == "1.0 d/a_train\n"
    assert (tmp_path / "out/third/blend.txt").read_text() == "0.5 d/a_train\n0.5 d/b_train\n"

    longer = blend("--config-dir", ".", "recipe=mine", "tokens=600", cwd=tmp_path)

    assert "Blend of mine, first+second (300 tokens)\n" in longer.stdout
    assert "Blend of mine, third (300 tokens)\n" in longer.stdout


def test_a_blend_on_the_command_line(tmp_path: Path, blend: Command) -> None:
    (tmp_path / "d").mkdir()
    words = ("data.directory=d", "data.blend={a: {share: 3, tokens: 100}, b: {share: 1, tokens: 5}}", "tokens=80")

    shown = blend(*words, cwd=tmp_path)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert rows(shown.stdout)["b"] == ["25", "%", "20", "5*", "4"]
    assert "warning" not in shown.stdout
    assert (
        "warning: some streams are read more than max_epochs=3 times: b 4 times"
        in blend(*words, "max_epochs=3", cwd=tmp_path).stdout
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no blend to show: set data=NAME"),
        (("data=mock",), "no blend to show"),
        (("data=domyn_foundation", "tokens=many"), "tokens='many': input should be a valid number"),
        (
            ("data=domyn_foundation", "require_files=true"),
            "english_train.idx does not exist, nor do the files of 3 other streams",
        ),
        (("data.directory=d", "data.blend={a: 1, b: -1}"), "data.blend.b must be a number above 0, not -1"),
        (
            ("data.directory=d", "data.blend={a: {share: 1, tokens: 5}}", "tokens=80", "refuse_epochs=9"),
            "data.blend.a: a would be read 16 times (80 tokens of 5), more than data.refuse_epochs=9",
        ),
        (("recipe=domyn_small/cpd",), "did you mean 'domyn_small/cpt'?"),
        (
            ("data.directory=d", "data.blend={a: {share: 1, tokens: 5}}", "output=/dev/null"),
            "output=/dev/null cannot be written (File exists): choose another directory",
        ),
    ],
)
def test_an_error_is_one_line(words: tuple[str, ...], message: str, tmp_path: Path, blend: Command) -> None:
    ended = blend(*words, cwd=tmp_path)

    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_blend_to_show_or_reads_packs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose("blend", [f"recipe={recipe}"])

    if config["data"].get("packed") is not None:
        with pytest.raises(ValueError, match=r"data\.packed is set, so there is no blend"):
            audit(config)
        return
    audit(config)
    assert "tokens)" in capsys.readouterr().out.splitlines()[0]
