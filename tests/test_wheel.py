"""A wheel, installed somewhere else, has everything the command needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-build-isolation"]  # torch brings setuptools along
    subprocess.run([*pip, "wheel", *alone, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--cfg", "job"],
        pytest.param(["train", "recipe=olmo3/7b_pretrain", "--cfg", "job"], marks=pytest.mark.slow),
        ["describe", "model=llama_nemotron_super_49b", "format=json"],
        pytest.param(["tokenize", "--cfg", "job"], marks=pytest.mark.slow),
    ],
)
def test_the_command_finds_its_configs(installed: Path, tmp_path: Path, words: list[str]) -> None:
    code = (
        f"import nemo_ext, sys; assert nemo_ext.__file__.startswith({str(installed)!r}), nemo_ext.__file__\n"
        f"sys.argv = ['nemo-ext', *{words!r}]\nfrom nemo_ext.cli import main\nmain()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout) > 200


def test_the_wheel_has_the_console_script_and_the_type_marker(installed: Path) -> None:
    assert (installed / "bin" / "nemo-ext").exists()
    assert (installed / "nemo_ext" / "py.typed").exists()


def test_the_wheel_alone_reports_what_is_here(installed: Path) -> None:
    """Not installed, and -S: without site-packages, so without pip."""
    (wheel,) = installed.parent.glob("*.whl")
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "nemo_ext", "doctor", "--install", "--json"],
        cwd=installed.parent,
        env={"PYTHONPATH": wheel.name, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (1, "")
    told = json.loads(ended.stdout)
    assert told["from"].startswith("wheel ") and told["error"].startswith("this Python has no pip")
    extras = {each["name"]: each["lacks"] for each in told["extras"]}
    assert "hydra-core<1.4,>=1.3.2" in extras["base"]
    assert {"nemo_rl", "gym", "ptq", "trl"} < extras.keys() and "math-verify>=0.9" in extras["trl"]


def test_the_wheel_has_the_batch_scripts(installed: Path) -> None:
    scripts = {path.name: path.read_text() for path in (ROOT / "slurm").glob("*.sbatch")}

    assert {path.name: path.read_text() for path in (installed / "nemo_ext/slurm/scripts").iterdir()} == scripts
