"""Sdist and wheel: what is in them, that every clone makes the same bytes, that an installed wheel has all it needs."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"nemo_ext", "hydra_conf", "launchers"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists what belongs to a release: no checkout"),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist` fills."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, str(ROOT / ".ci" / "dist.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, installed."""
    site = tmp_path_factory.mktemp("wheel") / "site"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    (wheel,) = dist.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def contents(path: Path) -> dict[str, bytes]:
    """Names and bytes of the files of a wheel or an sdist; an sdist's names without its folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(path) as sdist:
        pairs = [(member.name.partition("/")[2], sdist.extractfile(member)) for member in sdist if not member.isdir()]
        return {name: file.read() for name, file in pairs if file}


def tracked() -> set[str]:
    """The packages' files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name.partition("/")[0] in PACKAGES}


def test_the_wheel_is_the_packages_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = contents(wheel).keys()

    assert {name for name in names if ".dist-info/" not in name} == tracked()
    assert {Path(name).name for name in names if ".dist-info/" in name} == {
        *("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "LICENSE")
    }


def test_the_sdist_is_the_packages_and_what_builds_them(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    names = {name for name in contents(sdist) if not name.startswith("nemo_ext.egg-info/")}

    beside = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert names == tracked() | beside


def test_neither_names_a_folder_of_this_machine(dist: Path) -> None:
    folders = {str(folder).encode() for folder in (ROOT, Path.home(), dist, Path(sys.prefix)) if len(folder.parts) > 2}

    assert not [
        (path.name, name)
        for path in dist.iterdir()
        for name, content in contents(path).items()
        if any(folder in content for folder in folders)
    ]


def test_the_sdist_s_files_are_nobody_s_and_plain(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        members = opened.getmembers()

    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    assert {member.mode for member in members if not member.isdir()} == {0o644}
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert [member.name for member in members] == sorted(member.name for member in members)


def test_twine_is_content(dist: Path) -> None:
    files = map(str, dist.iterdir())

    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two clones with their `dist`: one plain; one elsewhere, its files old and private, beside what a build left."""
    made = []
    for umask, name in (("022", "plain"), ("077", "another")):
        clone = tmp_path_factory.mktemp(name) / name
        under(umask, "git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
        if name == "another":
            (clone / "build" / "lib" / "nemo_ext").mkdir(parents=True)
            for left in (clone / "nemo_ext" / "left.py", clone / "build" / "lib" / "nemo_ext" / "left.py"):
                left.write_text("left = 1\n")
            for path in clone.rglob("*.py"):
                os.utime(path, (1e9, 1e9))
        under(umask, sys.executable, str(clone / ".ci" / "dist.py"))
        made.append(clone)
    return made


def under(umask: str, *command: str) -> None:
    subprocess.run(["sh", "-c", f'umask {umask}; exec "$@"', "sh", *command], check=True)


@pytest.mark.slow
def test_two_clones_make_the_same_bytes(clones: list[Path]) -> None:
    first, second = ({path.name: path.read_bytes() for path in (clone / "dist").iterdir()} for clone in clones)

    assert {Path(name).suffix for name in first} == {".whl", ".gz"}
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.slow
def test_a_wheel_straight_from_a_clone_is_that_of_the_sdist(clones: list[Path], tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(clones[0])], check=True)
    (straight,), (from_sdist,) = tmp_path.glob("*.whl"), (clones[0] / "dist").glob("*.whl")

    assert contents(straight) == contents(from_sdist)


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


def test_the_wheel_alone_reports_what_is_here(dist: Path) -> None:
    """Not installed, and -S: with the standard library alone. pip, which runs without -S, finds all requirements."""
    (wheel,) = dist.glob("*.whl")
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "nemo_ext", "doctor", "--install", "--json"],
        cwd=dist,
        env={"PYTHONPATH": wheel.name, "PATH": "/nowhere", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    report = json.loads(ended.stdout)
    assert (report["error"], report["changed"], report["new"]) == ("", {}, {})
    (command,) = report["ways"]["This changes no installed package"]
    assert wheel.name in command


def test_the_wheel_has_the_batch_scripts(installed: Path) -> None:
    scripts = {path.name: path.read_text() for path in (ROOT / "slurm").glob("*.sbatch")}

    assert {path.name: path.read_text() for path in (installed / "nemo_ext/slurm/scripts").iterdir()} == scripts
