"""`nemo-ext doctor --install` with real pip, in small environments of packages that the test makes; no network."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import venv
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_ext import install

ROOT = Path(__file__).parents[1]
TORCH = "2.12.0a0+nv25.12"
BASE = ("numpy>=1.26",)
EXTRAS = {
    "engine": ["torch>=2.11", "megatron-core>=0.18"],
    "nemo-rl": ["nemo_ext[engine]", "ray>=2"],
    "data": ["pyarrow>=15", 'old>=1; python_version < "3"'],
}


def wheel(folder: Path, name: str, version: str, requires: Sequence[str] = (), *, content: bytes = b"") -> Path:
    """A wheel of metadata alone, or added to a zip."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(content)
    about = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *requires]
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/entry_points.txt", "[nemo_ext.jobs]\ndoctor = nemo_ext.doctor:DOCTOR\n")
        file.writestr(f"{about}/RECORD", f"{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return path


@cache
def code() -> bytes:
    """The files of ours that a report may import, as a zip: an import of anything more fails."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        rooms = ("nemo_ext", "nemo_ext/job", "nemo_ext/megatron", "launchers")
        for path in (path for room in rooms for path in (ROOT / room).glob("*.py")):
            file.write(path, path.relative_to(ROOT))
    return whole.getvalue()


class Place:
    """A virtual environment with pip alone, an index in a folder, and our wheel."""

    def __init__(self, folder: Path, *, pip: bool = True) -> None:
        self.folder, self.links = folder, folder / "links"
        self.links.mkdir()
        venv.create(folder / "env", symlinks=True)
        (self.site,) = (folder / "env").glob("lib/*/site-packages")
        self.environment = {
            "PATH": f"{folder / 'env' / 'bin'}:/usr/bin:/bin",
            "HOME": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.links),
            "PIP_NO_COMPILE": "1",
        }
        if pip:
            found = pytest.importorskip("pip", reason="this environment has no pip")
            for path in (Path(found.__file__).parent, *Path(found.__file__).parents[1].glob("pip-*.dist-info")):
                (self.site / path.name).symlink_to(path)

    def offer(self, name: str, version: str, *requires: str) -> Path:
        return wheel(self.links, name, version, [f"Requires-Dist: {line}" for line in requires])

    def put(self, name: str, version: str, *, direct: Mapping[str, Any] | None = None) -> None:
        """Installs a package."""
        with zipfile.ZipFile(wheel(self.folder / "made", name, version)) as file:
            file.extractall(self.site)
        (self.site / f"{name}-{version}.dist-info" / "INSTALLER").write_text("pip\n")
        if direct:
            (self.site / f"{name}-{version}.dist-info" / "direct_url.json").write_text(json.dumps(direct))

    def own(self, base: Sequence[str] = BASE) -> Path:
        requires = [f"Requires-Dist: {line}" for line in base]
        for extra, lines in EXTRAS.items():
            requires.append(f"Provides-Extra: {extra}")
            for line in lines:
                requires.append(f"Requires-Dist: {line}{' and' if ';' in line else ';'} extra == {extra!r}")
        return wheel(self.folder, "nemo_ext", "9.9", requires, content=code())

    def run(self, *words: str, path: Path | str = "nemo_ext-9.9-py3-none-any.whl", **more: str) -> Any:
        return subprocess.run(
            [self.folder / "env" / "bin" / "python", "-m", "nemo_ext", "doctor", "--install", *words],
            cwd=self.folder,
            env={**self.environment, "PYTHONPATH": str(path), **more},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def told(self, *words: str, code: int, **more: Any) -> dict[str, Any]:
        result = self.run("--json", *words, **more)
        assert (result.returncode, result.stderr) == (code, "")
        return json.loads(result.stdout)

    def follow(self, told: Mapping[str, Any], way: int = -1) -> tuple[dict[str, str], str]:
        """Run a command of a report in a shell, from its text; returns the installed packages and the output."""
        commands = install.text({**told}).split("\n\n")[way].partition("\n")[2]
        words = ["bash", "-ec", commands]
        done = subprocess.run(words, cwd=self.folder, env=self.environment, stdout=-1, stderr=-2, text=True, check=True)
        return self.installed(), done.stdout

    def installed(self) -> dict[str, str]:
        names = (re.fullmatch(r"(.+?)-([^-]+)\.dist-info", path.name) for path in self.site.glob("*.dist-info"))
        return {found[1]: found[2] for found in names if found}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.put("torch", TORCH)
    made.put("megatron_core", "0.18.2+abc", direct={"url": f"file://{tmp_path}/m", "dir_info": {"editable": True}})
    return made


PIP = "~/env/bin/python -m pip"
REFUSES = "This fails rather than change installed packages"
LEAVES_OUT = "This installs the compatible packages, and lists the ones it skips"


def test_nothing_changes(place: Place) -> None:
    place.own()
    place.offer("numpy", "2.0")
    before = place.installed()
    (place.folder / "constraint.txt").write_text("numpy<3\n")

    told = place.told(
        code=0,
        NVIDIA_PYTORCH_VERSION="25.12",
        NEMO_API_KEY="secret",
        PIP_CONSTRAINT=str(place.folder / "constraint.txt"),
    )

    assert (told["changes"], told["changed"], told["new"]) == (False, {}, {"numpy": "2.0"})
    assert told["ways"] == {"This changes no installed package": [f"{PIP} install ~/nemo_ext-9.9-py3-none-any.whl"]}
    assert told["here"]["PIP_CONSTRAINT"] == "~/constraint.txt"
    assert told["here"]["NVIDIA_PYTORCH_VERSION"] == "25.12"
    assert "secret" not in json.dumps(told)
    assert told["engines"] == {
        "torch": f"{TORCH}  LOCAL BUILD",
        "megatron-core": "0.18.2+abc  LOCAL BUILD from ~/m",
    }
    assert place.follow(told)[0] == {**before, "numpy": "2.0", "nemo_ext": "9.9"}


def test_a_change_is_named_and_the_constraints_keep_what_is_here(place: Place) -> None:
    """The newest helper requires a newer torch, its predecessor does not. An older nemo_ext may be replaced."""
    place.own(["helper"])
    place.offer("torch", "2.13.0", "nvidia-cudnn-cu13")
    place.offer("nvidia_cudnn_cu13", "9")
    place.offer("helper", "2", "torch>=2.13")
    place.offer("helper", "1", "torch", "megatron-core")
    place.put("nemo_ext", "9.8")
    before = place.installed()

    told = place.told("--extra", "engine", code=1)

    assert told["changes"] is True
    assert told["changed"] == {"torch": f"{TORCH} -> 2.13.0"}
    assert told["new"] == {"helper": "2", "nvidia-cudnn-cu13": "9"}
    shown = install.text(told)
    assert f"changed\n  torch              {TORCH} -> 2.13.0\n" in shown
    assert "new\n  " in shown and "\n  nvidia-cudnn-cu13  9\n" in shown and "\n  helper             2\n" in shown
    assert told["ways"][REFUSES] == [
        f"{PIP} list --format=freeze --exclude nemo_ext > here.txt",
        f"{PIP} install -c here.txt ~/'nemo_ext-9.9-py3-none-any.whl[engine]'",
    ]
    assert place.follow(told, -2)[0] == {**before, "helper": "1", "nemo_ext": "9.9"}
    assert f"torch=={TORCH}\n" in (place.folder / "here.txt").read_text()


@pytest.mark.slow
def test_what_no_installation_can_have_is_named_and_the_rest_installed(place: Place) -> None:
    """A release of torch that the pre-release here is not, another version of Megatron, and a package of no index."""
    place.own(["torch>=2.12", "megatron-core<0.18", "einops>=0.8", "nowhere>=1"])
    place.offer("einops", "0.8.2")
    place.offer("torch", "2.12.0")
    before = place.installed()

    told = place.told("--extra", "engine", code=1)

    assert told["changes"] is None
    assert "nowhere" in told["error"] or "megatron-core" in told["error"]
    installed, said = place.follow(told)
    assert installed == {**before, "einops": "0.8.2", "nemo_ext": "9.9"}
    assert "skipped: nowhere>=1" in said and said.count("skipped") == 1


def test_a_text_can_begin_an_issue(place: Place) -> None:
    place.own(["torch>=2.13", "numpy"])
    place.offer("torch", "2.13.0")
    place.offer("numpy", "1")
    place.offer("pyarrow", "15")

    result = place.run("--extra", "data", "engine", FORCE_COLOR="1")

    lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (1, "")
    assert lines[0].startswith("nemo_ext ") and lines[0].endswith(": nemo-ext doctor --install --extra data engine")
    assert "\x1b" not in result.stdout and str(place.folder) not in result.stdout
    assert f"  torch              {TORCH} -> 2.13.0" in lines
    assert f"    {PIP} install --no-deps ~/'nemo_ext-9.9-py3-none-any.whl[data,engine]' &&" in lines


def test_a_source_tree_is_not_to_be_doubled(place: Place, tmp_path: Path) -> None:
    shutil.rmtree(place.site / "megatron_core-0.18.2+abc.dist-info")
    tree = tmp_path / "Megatron-LM"
    (tree / "megatron" / "core").mkdir(parents=True)
    (tree / "megatron" / "core" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tree / "torch").mkdir()
    (tree / "torch" / "__init__.py").touch()
    place.offer("megatron_core", "0.19.0")
    own = place.own([])

    told = place.told("--extra", "engine", code=1, path=f"{own}{os.pathsep}{tree}")

    assert told["engines"]["megatron-core"].startswith("source tree ~/Megatron-LM/megatron/core, without metadata")
    assert told["engines"]["torch"].endswith("hidden by ~/Megatron-LM/torch, which is imported instead")
    assert told["changed"] == {"megatron-core": "source tree -> 0.19.0"}
    assert [*told["ways"]] == [LEAVES_OUT]
    assert "megatron_core" not in place.follow(told)[0]


def test_without_an_index_the_answer_takes_seconds(place: Place) -> None:
    place.own()
    begin = time.monotonic()

    told = place.told(code=1, PIP_INDEX_URL="http://me:hidden@127.0.0.1:9/simple", PIP_NO_INDEX="0", PIP_TIMEOUT="600")

    assert time.monotonic() - begin < 30
    assert "Retrying" in told["error"]
    assert "hidden" not in json.dumps(told)
    assert told["changes"] is None
    assert "-c here.txt" in told["ways"][REFUSES][1]
    assert told["engines"]["torch"].startswith(TORCH)


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("limit", marks=pytest.mark.deep)])
def test_a_pip_that_hangs_is_ended(place: Place, how: str) -> None:
    place.own()
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        more = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple", "PIP_NO_INDEX": "0"}
        words = [place.folder / "env" / "bin" / "python", "-m", "nemo_ext", "doctor", "--install"]
        # Longer than pip takes to start, shorter than it tries.
        words += ["--time-limit", "8"] if how == "limit" else []
        environment = {**place.environment, **more, "PYTHONPATH": "nemo_ext-9.9-py3-none-any.whl"}
        with subprocess.Popen(
            words, cwd=place.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as doctor:
            asked, _ = index.accept()  # pip is at work
            if how == "Ctrl-C":
                doctor.send_signal(signal.SIGINT)
            output, errors = doctor.communicate(timeout=60)
        asked.settimeout(3)  # pip itself would hold it for 5 s
        while asked.recv(65536):
            pass  # pip has let go of it
        asked.close()

    if how == "Ctrl-C":
        assert (doctor.returncode, output, errors) == (130, "", "")
    else:
        assert (doctor.returncode, errors) == (1, "")
        assert "pip took longer than 8 s" in output


def test_without_pip(tmp_path: Path) -> None:
    place = Place(tmp_path, pip=False)
    place.put("torch", TORCH)
    place.own()

    told = place.told(code=1)

    assert told["error"].endswith("No module named pip")
    assert told["engines"]["torch"].startswith(TORCH)


def test_extras_are_those_of_the_metadata(place: Place) -> None:
    place.own([])
    place.offer("ray", "3")

    told = place.told("--extra", "nemo-rl", code=0)

    assert told["new"] == {"ray": "3"}
    assert "[nemo_rl]" in str(told["ways"])
    place.offer("pyarrow", "15")
    assert place.told("--extra", "data", code=0)["new"] == {"pyarrow": "15"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--extra", "engin"], "unknown extra 'engin': did you mean 'engine'? known: base, data, engine, nemo_rl"),
        (["torch"], "--install does not accept names of engines"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    place = Place(tmp_path, pip=False)
    place.own()

    result = place.run(*words)

    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        *((f"https://{secret}@m.example/c.txt", "https://****@m.example/c.txt") for secret in ("me:x", "x", "me:x@y")),
        ("https://m.example/c.txt?token=x", "https://m.example/c.txt?****"),
        ("git+ssh://git@m.example/r@v1#egg=x", "git+ssh://****@m.example/r@v1?****"),
        ("/plain/path.txt", "/plain/path.txt"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str) -> None:
    assert install.shown(f"constraints {address}") == f"constraints {shown}"
    assert json.loads(install.shown(json.dumps([address, 1]))) == [shown, 1]


def test_a_pip_that_fails_says_why(place: Place, tmp_path: Path) -> None:
    place.own()

    told = place.told(code=1, PIP_CONSTRAINT=str(tmp_path / "c.txt"))

    assert told["changes"] is None
    assert "Could not open requirements file" in told["error"]


@pytest.mark.parametrize("text", ['{"dir_info": {}}', "{broken"])
def test_a_record_of_an_origin_that_is_broken_says_nothing(tmp_path: Path, text: str) -> None:
    place = Place(tmp_path, pip=False)
    place.put("torch", TORCH)
    (folder,) = place.site.glob("torch-*.dist-info")
    (folder / "direct_url.json").write_text(text)
    place.own()

    assert place.told(code=1)["engines"]["torch"] == f"{TORCH}  LOCAL BUILD"
