"""nemo_ext beside engines that are there already: other versions, a container's own builds, none.

Environments are built by uv, which takes wheels from its cache. `make installs` runs every cell of the table in
docs/installs.md and writes it; the tests run those of the oldest version. Packages are downloaded: tests with a torch
of their own are deep, those of a login node without any engine are slow.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from nemo_ext.engines import OLDEST_MEGATRON
from nemo_ext.job.job import Job
from nemo_ext.job.registry import commands

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "installs.md"

BEGIN, END = "<!-- made by `make installs` -->\n", "<!-- end -->\n"
SOURCE = "MEGATRON_LM_ROOT"
"""Environment variable with the path of a Megatron-LM checkout: the column `main` of the table."""

ENGINES = {
    OLDEST_MEGATRON: (f"megatron-core=={OLDEST_MEGATRON}", "torch==2.11.0"),
    "0.19.2": ("megatron-core==0.19.2", "torch==2.12.0"),
    "main": (SOURCE, "torch==2.15.0"),
}
"""Columns of the table: Megatron-Core and the torch beside it."""

WITHOUT_HYBRID = "megatron-core==0.17.1"
"""The last Megatron-Core without `core.models.hybrid`."""

TESTING = ("pytest<9.2", "pytest-xdist", "hypothesis")

CELLS = {
    "`describe`": ("tests/test_describe_launcher.py",),
    "`convert`, both ways": ("tests/checkpoint/test_parity.py", "tests/checkpoint/test_convert.py"),
    "the spec in a plain HybridModel": ("tests/megatron/test_specs.py",),
    "`train`": ("tests/megatron/test_training.py", "tests/test_launch.py"),
    "`train`, killed and resumed": ("tests/test_launch.py::test_stopped_by_ctrl_c_then_killed_it_goes_on_exactly",),
    "Puzzle's library and scores": ("tests/puzzle/stages/test_score.py", "tests/puzzle/stages/test_measure.py"),
    "`rl` with TRL": ("tests/rl/trl/test_run.py::test_rloo_trains_and_validates",),
}
"""Rows of the table: what has to work, by the tests of this repository that show it; slow ones where named."""


LACKS = {
    "`convert`, both ways": ("6 skipped: came with Megatron-Core 0.19",),
    "the spec in a plain HybridModel": ("1 skipped: came with Megatron-Core 0.19",),
    "Puzzle's library and scores": ("2 skipped: came with Megatron-Core 0.19",),
}
"""Rows in which the oldest version is too old for some tests."""


def uv(*words: str) -> str:
    """Output of uv, which downloads no Python."""
    given = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    program = Path(sysconfig.get_path("scripts")) / "uv"
    ended = subprocess.run([program, *words], env=given, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"uv {' '.join(words)}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def built_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built into a folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("nemo_ext-*.whl")
    return built


def environment(folder: Path, *requirements: str) -> Path:
    """The Python of a new environment with these packages, without its own pip."""
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    python = folder / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", str(python), *requirements)
    return python


def versions(python: Path) -> dict[str, str]:
    """Version of every package of an environment."""
    return {one["name"]: one["version"] for one in json.loads(uv("pip", "list", "--format=json", "-p", str(python)))}


def with_engines(name: str, folder: Path) -> Path:
    """The Python of a new environment of a column of the table, in which the tests of all rows can run."""
    megatron, torch = ENGINES[name]
    if megatron == SOURCE:
        megatron = str(megatron_wheel(Path(os.environ[SOURCE]), folder))
    return environment(folder / "environment", torch, megatron, f"{built_wheel(folder)}[data,trl]", *TESTING)


def megatron_wheel(source: Path, folder: Path) -> Path:
    """The wheel of a Megatron-LM tree; its version ends with the commit of the git repository it lies in."""
    uv("build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", str(folder), str(source))
    (built,) = folder.glob("megatron_core-*.whl")
    return built


def engines_in(names: Iterable[str]) -> list[str]:
    """The packages among these that bring an engine or CUDA."""
    return [name for name in names if re.match(r"torch|triton|megatron|nvidia-(?!ml-py)|cuda", name)]


def command(python: Path, words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A finished `nemo-ext` of an environment, started in a folder without our sources."""
    line = [str(python.parent / "nemo-ext"), *shlex.split(words)]
    return subprocess.run(line, cwd=folder, env=outside(), capture_output=True, text=True, check=False)


def outside() -> dict[str, str]:
    """The environment variables without those of this test run."""
    ours = ("PYTEST_", "PYTHON", "NEMO_RL_ROOT", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Outcome(NamedTuple):
    """Result of a cell: number of tests that passed, what came too late for the engines, the log of a failure."""

    passed: int
    lacks: tuple[str, ...]
    failure: str

    def __str__(self) -> str:
        if self.failure:
            return "**fails**"
        return f"{self.passed} passed" + "".join(f", {lack}" for lack in self.lacks)


def outcome(python: Path, row: str, folder: Path) -> Outcome:
    """Runs a row's tests with another environment's Python, whose nemo_ext is the one that is installed there."""
    words = ["-P", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={folder}", *CELLS[row]]
    if all("::" in each for each in CELLS[row]):
        words += ["-m", "slow or not slow"]
    ended = subprocess.run(
        [str(python), *words],
        cwd=ROOT,
        env=outside(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", ended.stdout)
    lacks = re.findall(r"SKIPPED \[(\d+)\] .*(came with Megatron-Core [\d.]+)", ended.stdout)
    what = tuple(f"{count} skipped: {why}" for count, why in lacks)
    return Outcome(int(passed[1]) if passed else 0, what, ended.stdout if ended.returncode else "")


def table(columns: dict[str, dict[str, Outcome]], torch: dict[str, str]) -> str:
    """The table as Markdown; rows as in `CELLS`."""
    heads = [f"{name}, torch {torch[name]}" for name in columns]
    lines = [["megatron-core", *heads], ["---"] * (len(heads) + 1)]
    lines += [[row, *(str(cells[row]) for cells in columns.values())] for row in CELLS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Builds every environment, runs every cell, and writes the table; failed cells' logs are printed."""
    columns: dict[str, dict[str, Outcome]] = {}
    torch: dict[str, str] = {}
    for name in ENGINES:
        if name == "main" and SOURCE not in os.environ:
            sys.exit(f"{SOURCE} is not set: name a Megatron-LM checkout for the column `main`")
        with tempfile.TemporaryDirectory() as folder:
            python = with_engines(name, Path(folder))
            found = versions(python)
            title, torch[found["megatron-core"]] = found["megatron-core"], found["torch"]
            columns[title] = {}
            for row in CELLS:
                columns[title][row] = one = outcome(python, row, Path(folder) / "tests")
                print(f"{title}  {row}: {one}{one.failure and chr(10) + one.failure[-6000:]}", flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table(columns, torch) + END + rest.split(END)[1])
    if any(cell.failure for cells in columns.values() for cell in cells.values()):
        sys.exit(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(OLDEST_MEGATRON, tmp_path_factory.mktemp("oldest"))


@pytest.fixture(scope="module")
def without(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No engine at all: a login node."""
    return environment(tmp_path_factory.mktemp("without") / "environment", str(wheel))


@pytest.mark.deep
@pytest.mark.parametrize("row", CELLS)
def test_the_oldest_megatron_core_can_do_it(oldest: Path, row: str, tmp_path: Path) -> None:
    one = outcome(oldest, row, tmp_path / "tests")

    assert not one.failure, one.failure[-6000:]
    assert one.passed
    assert one.lacks == LACKS.get(row, ())


@pytest.mark.deep
def test_a_megatron_core_without_hybrid_models_is_refused(oldest: Path, tmp_path: Path) -> None:
    """Found before the other place where Python looks for packages, as a source tree on PYTHONPATH is."""
    uv("pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "old"), WITHOUT_HYBRID)

    ended = subprocess.run(
        [str(oldest.parent / "nemo-ext"), "train", "data=mock"],
        cwd=tmp_path,
        env=outside() | {"PYTHONPATH": str(tmp_path / "old")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert f"requires megatron-core {OLDEST_MEGATRON} or later" in ended.stderr


@pytest.mark.slow
def test_nothing_of_the_engines_comes_with_the_base(without: Path) -> None:
    assert not engines_in(versions(without))


JOBS = [command.name for command in commands() if command.group]
COMPOSED = ["rehearse", *(command.name for command in commands() if isinstance(command, Job))]

FORKS = """
import json, os, shlex, sys, traceback
import nemo_ext.job.config
from hydra._internal.hydra import Hydra
from nemo_ext.cli import main
Hydra.format_config_groups = lambda *_: ""  # a list for help, which takes seconds
codes = []
for number, words in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
        sys.argv, code = ["nemo-ext", *shlex.split(words)], 1
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""
"""Commands in forks of one process: to import our base takes longer than most of them."""


def forked(python: Path, lines: Sequence[str], folder: Path) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of `nemo-ext LINE` in an environment, in a folder without our sources."""
    words = [str(python), "-c", FORKS, json.dumps(lines)]
    ended = subprocess.run(words, cwd=folder, env=outside(), capture_output=True, text=True, check=True)
    codes = json.loads(ended.stdout)
    texts = [[(folder / f"{number}.{name}").read_text() for name in ("out", "err")] for number in range(len(lines))]
    return {line: (code, *text) for line, code, text in zip(lines, codes, texts, strict=True)}


@pytest.mark.slow
def test_a_login_node_needs_no_engine_to_ask_for_help_and_to_compose(without: Path, tmp_path: Path) -> None:
    helped = forked(without, [f"{job} --help" for job in JOBS], tmp_path)
    composed = forked(without, [f"{job} --cfg job" for job in COMPOSED], tmp_path)

    for line, (code, said, errors) in (helped | composed).items():
        assert code == 0, (line, errors)
        assert len(said) > 200 or line in composed, line
    assert all(len(yaml.safe_load(said)) > 1 for _, said, _ in composed.values())


NEEDS = {
    "train data=mock": "torch and megatron-core",
    "puzzle data=mock": "torch and megatron-core",
    "sensitivity sensitivity.model=m": "torch and megatron-core",
    "convert from=a to=b": "torch",
    "merge 'from=[a, b]' to=c": "torch",
    "quantize from=a to=b calibration.data=c precision=fp8_current": "torch",
}


@pytest.mark.slow
def test_a_job_that_needs_an_engine_says_the_one_command(without: Path, tmp_path: Path) -> None:
    for line, (code, _, errors) in forked(without, list(NEEDS), tmp_path).items():
        assert (code, errors.count("\n")) == (2, 1), (line, errors)
        assert f"this job requires {NEEDS[line]}: pip install 'nemo_ext[engine]'" in errors
    assert {path.suffix for path in tmp_path.iterdir()} == {".out", ".err"}, "nothing but what was said"


@pytest.mark.slow
def test_a_login_node_describes_prepares_and_submits(without: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document\n")
    (tmp_path / "b.txt").write_text("another document\n")
    job = "submit --dry-run cluster=leonardo account=mine 'streams={mine: 1}' data_root=data"
    steps = ["describe model=domyn_small_tiny", "tokenize 'input=*.txt' output=data/mine", job]
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "sbatch").chmod(0o755)

    for words in steps:
        ended = subprocess.run(
            [str(without.parent / "nemo-ext"), *shlex.split(words)],
            cwd=tmp_path,
            env=outside() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_offline_corpus_of_engines_names_the_extra(without: Path, tmp_path: Path) -> None:
    ended = command(without, "tokenize data=local_text data_root=d", tmp_path)

    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "package 'megatron' of `packages` is not installed; run pip install 'nemo_ext[engine]'" in ended.stderr


def rename_torch(python: Path, label: str) -> str:
    """Gives an environment's torch another version, as if its wheel had been built elsewhere; returns that version.

    Files are written anew, as uv links them to its cache.
    """
    (packages,) = python.parents[1].glob("lib/python3.*/site-packages")
    (info,) = packages.glob("torch-*.dist-info")
    old = info.name.removeprefix("torch-").removesuffix(".dist-info")
    new = f"{old}{label}"
    renamed = packages / f"torch-{new}.dist-info"
    shutil.copytree(info, renamed)
    shutil.rmtree(info)
    for file, before, after in (
        (renamed / "METADATA", rf"Version: {old}\b", f"Version: {new}"),
        (renamed / "RECORD", re.escape(info.name), renamed.name),
        (packages / "torch" / "version.py", rf"'{old}[^']*'", f"'{new}'"),
    ):
        text, found = re.subn(before, after, file.read_text())
        assert found, f"{file} does not say {before!r}"
        file.unlink()
        file.write_text(text)
    return new


def megatron_of_a_commit(folder: Path) -> Path:
    """A Megatron-Core built from a source tree in a git repository, whose commit its version names."""
    if SOURCE in os.environ:
        return megatron_wheel(Path(os.environ[SOURCE]), folder)
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), "megatron-core==0.19.0"], check=True)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder, filter="data")
    tree = folder / sdist.name.removesuffix(".tar.gz")
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "a commit"]):
        subprocess.run([*git, *words], check=True)
    return megatron_wheel(tree, folder)


@pytest.mark.deep
def test_a_container_keeps_its_own_builds(wheel: Path, tmp_path: Path) -> None:
    """Stand-in for NVIDIA's images: their own torch and Megatron-Core, and a constraints file."""
    megatron = megatron_of_a_commit(tmp_path)
    python = environment(tmp_path / "environment", "torch==2.12.0", str(megatron), "pip")
    torch = rename_torch(python, "a0+nv26.10")
    before = versions(python)
    assert before["torch"] == torch and "+" in before["megatron-core"]
    constraints = tmp_path / "constraint.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in before.items()))

    for extra in ("", "[data,trl]"):
        subprocess.run(
            [str(python), "-m", "pip", "--quiet", "install", f"{wheel}{extra}"],
            env=outside() | {"PIP_CONSTRAINT": str(constraints)},
            check=True,
        )

    after = versions(python)
    assert {name: after.get(name) for name in before} == before
    assert not engines_in(after.keys() - before.keys())
    for words in (
        "describe model=nemotron3_nano_tiny",
        "train data=mock train.tokens=4e4 run_dir=run",
        "convert from=run to=exported",
        "convert from=exported to=again",
    ):
        ended = command(python, words, tmp_path)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    uv("pip", "install", "--quiet", "--python", str(python), *TESTING)
    one = outcome(python, "`rl` with TRL", tmp_path / "tests")
    assert one.passed and not one.failure, one.failure[-6000:]


if __name__ == "__main__":
    main()
