"""Real Ray workers, and a package in Megatron-Bridge's place: they register with it when they import it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_ext.rl.nemo_rl.workers import HOOK, VARIABLE, use, with_bridges

DRIVER = """
import sys, ray
given = {"env_vars": {"PYTHONPATH": sys.argv[1]}}
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=given)

@ray.remote
def registered():
    import sys
    before = "nemo_ext" in sys.modules
    import megatron.bridge
    return before, getattr(sys.modules.get("nemo_ext"), "CALLS", None)

print(ray.get(registered.remote()))
"""


def driven(folder: Path, *path: Path) -> str:
    """What a worker says whose `megatron.bridge` is an empty package."""
    (folder / "megatron" / "bridge").mkdir(parents=True)
    (folder / "megatron" / "bridge" / "__init__.py").touch()
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, os.pathsep.join(map(str, (folder, *path)))],
        cwd=folder,
        env={**os.environ, VARIABLE: "nemo_ext.rl.nemo_rl.workers.with_bridges", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_worker_registers_when_it_imports_megatron_bridge(tmp_path: Path) -> None:
    (tmp_path / "own" / "nemo_ext").mkdir(parents=True)
    (tmp_path / "own" / "nemo_ext" / "__init__.py").write_text(
        "CALLS = 0\ndef register():\n    global CALLS\n    CALLS += 1\n"
    )

    assert driven(tmp_path / "bridge", tmp_path / "own") == "(False, 1)"


@pytest.mark.slow
def test_a_worker_without_nemo_ext_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "nemo_ext.py").write_text("raise ImportError('not here')\n")

    assert driven(tmp_path / "bridge", tmp_path / "none") == "(False, None)"


def test_the_users_own_set_up_stays() -> None:
    assert with_bridges({HOOK: "theirs", "env_vars": {}}) == {HOOK: "theirs", "env_vars": {}}


@pytest.mark.parametrize("before", ["", "hook()", "importlib.util.find_spec('megatron.bridge')"])
def test_a_probe_does_not_use_the_hook_up(tmp_path: Path, before: str) -> None:
    bridge = tmp_path / "megatron" / "bridge"
    bridge.mkdir(parents=True)
    (bridge / "__init__.py").touch()
    code = f"""
import importlib.util, sys
import nemo_ext
from nemo_ext.rl.nemo_rl.workers import _register_with_bridge as hook
sys.path.insert(0, {str(tmp_path)!r})
nemo_ext.register = lambda: print("registered")
hook()
{before}
import megatron.bridge
import megatron.bridge
"""

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (0, "registered\n"), ended.stderr


def test_the_users_own_hook_stays_and_is_told_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "theirs.hook")

    use()

    assert os.environ[VARIABLE] == "theirs.hook"
    assert "workers lack our bridges" in capsys.readouterr().err
