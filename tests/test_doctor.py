"""`nemo-ext doctor` on environments made of folders: namesakes, broken, hanging and outdated engines, absent GPUs.

What is written here is found before what is installed, so the tests hold with any engine installed.
"""

import importlib.metadata
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.doctor import BASE, Finding, examine, works
from nemo_ext.engines import ENGINES, UNTESTED_MEGATRON, probe, require

Install = Callable[..., Path]
TORCH = next(engine for engine in ENGINES if engine.name == "torch")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes modules (`name="text"`, `__` for a dot) to where every engine is looked for first."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)

    def write(*, folder: Path = site, **modules: str) -> Path:
        for name, text in modules.items():
            package = folder.joinpath(*name.split("__"))
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(text)
        return site

    return write


def torch_with(*capabilities: tuple[int, int], sums: str = "2.0") -> str:
    """The text of a torch that sees one GPU for each compute capability."""
    return f"""
from types import SimpleNamespace
capabilities = {list(capabilities)!r}
def get_device_properties(index):
    major, minor = capabilities[index]
    return SimpleNamespace(name=f"GPU {{major}}{{minor}}", major=major, minor=minor, total_memory=80 * 2**30)
cuda = SimpleNamespace(
    is_available=lambda: bool(capabilities),
    device_count=lambda: len(capabilities),
    get_device_properties=get_device_properties,
)
version = SimpleNamespace(cuda="13.0")
def item():
    return {sums}
def ones(*size, device):
    return SimpleNamespace(sum=lambda: SimpleNamespace(item=item))
"""


TRANSFORMER_ENGINE = {"transformer_engine": "__version__ = '2.9'", "transformer_engine__pytorch": "Linear = 1"}


def find(name: str, *, time_limit: float = 60) -> Finding:
    return next(finding for finding in examine([name], time_limit=time_limit) if finding.name == name)


def ended(process: int) -> bool:
    """Whether a process that is not our child has ended, or does within seconds of its kill."""
    status = Path("/proc", str(process), "stat")
    for _ in range(500):
        try:
            if status.read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


# Engines that are there, and are not what they should be


def test_the_apex_of_pypi_is_not_nvidias(install: Install) -> None:
    install(torch=torch_with((9, 0)), apex="from apex.lib import form")

    apex = find("apex")

    assert not apex.usable
    assert "another project" in apex.missing
    assert apex.command.startswith("pip uninstall -y apex && ")
    assert "github.com/NVIDIA/apex" in apex.command


def test_an_apex_without_its_extensions_is_to_be_built_again(install: Install) -> None:
    amp_c = "raise ModuleNotFoundError('No module named amp_C', name='amp_C')"
    install(torch=torch_with((9, 0)), apex="", apex__normalization="", amp_C=amp_c)

    apex = find("apex")

    assert "amp_C" in apex.missing
    assert "--force-reinstall" in apex.command


def test_a_whole_apex_is_usable(install: Install) -> None:
    install(torch=torch_with((9, 0)), apex="__version__ = '0.1'", apex__normalization="", amp_C="")

    apex = find("apex")

    assert (apex.usable, apex.version, apex.missing, apex.command) == (True, "0.1", "", "")


def test_the_empty_nemo_rl_of_pypi_is_told_from_a_checkout(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(torch=torch_with(), nemo_rl="__version__ = '0.0.0'")
    checkout, other = tmp_path / "checkout", tmp_path / "other"
    install(
        folder=checkout,
        nemo_rl="__version__ = '0.6.0'",
        nemo_rl__algorithms="",
        nemo_rl__algorithms__grpo="grpo_train = 1",
    )

    empty = find("nemo_rl")
    monkeypatch.setenv("NEMO_RL_ROOT", str(checkout))
    real = find("nemo_rl")
    monkeypatch.setenv("NEMO_RL_ROOT", str(other))
    elsewhere = find("nemo_rl")

    assert not empty.usable
    assert empty.missing == "a source checkout, named by NEMO_RL_ROOT: the installed nemo_rl is PyPI's empty package"
    assert "git clone" in empty.command
    assert (real.usable, real.version) == (True, "0.6.0")
    assert "policies train on GPUs" in real.note
    assert elsewhere.missing == f"a source checkout, named by NEMO_RL_ROOT; there is none in {other}"


def test_a_folder_that_an_uninstalled_package_left_is_no_engine(install: Install) -> None:
    (install() / "left_behind" / "__pycache__").mkdir(parents=True)

    assert not probe(replace(TORCH, name="left_behind", imports=("left_behind",))).found


def test_an_outdated_engine_is_not_usable(install: Install) -> None:
    site = install(torch=torch_with(), trl="DPOTrainer = GRPOTrainer = 1")
    (site / "trl-0.1.0.dist-info").mkdir()
    (site / "trl-0.1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.1.0\n")

    trl = find("trl")

    assert trl.version == "0.1.0"
    assert trl.missing == "trl>=1.16 (installed: 0.1.0)"


def test_a_containers_prerelease_counts(install: Install) -> None:
    site = install(torch=torch_with())
    (site / "torch-2.11.dist-info").mkdir()
    (site / "torch-2.11.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0a0+nv26.2\n"
    )

    assert find("torch").usable


# Engines that fail at import


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('boom\\nand more')", "RuntimeError: boom"),
        ("raise SystemExit('please log in')", "SystemExit: please log in"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os, sys; print('no licence', file=sys.stderr); os._exit(3)", "code 3: no licence"),
        ("", "no attribute 'SimpleResourcesServer'"),
    ],
)
def test_an_engine_that_fails_at_import_is_reported_with_its_reason(install: Install, text: str, said: str) -> None:
    install(nemo_gym=text, nemo_gym__base_resources_server="")

    gym = find("nemo_gym")

    assert not gym.usable
    assert said in gym.missing
    assert "\n" not in gym.missing
    assert gym.command == 'pip install --force-reinstall --no-deps "nemo-gym>=0.4"'


def test_a_dependency_that_is_not_there_is_named(install: Install) -> None:
    install(nemo_gym="import yaml_of_another_world.loader")

    gym = find("nemo_gym")

    assert "yaml_of_another_world" in gym.missing
    assert gym.command == "pip install yaml_of_another_world"


def test_an_import_that_hangs_is_stopped_with_all_that_it_started(install: Install, tmp_path: Path) -> None:
    started = tmp_path / "child"
    install(
        nemo_gym=f"""
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(started)!r}).write_text(str(child.pid))
time.sleep(600)
"""
    )

    gym = find("nemo_gym", time_limit=1)

    assert not gym.usable
    assert "longer than 1 s" in gym.missing
    assert gym.command == "nemo-ext doctor nemo_gym --time-limit 10"
    assert ended(int(started.read_text()))


def test_an_interrupted_doctor_leaves_nothing_behind(install: Install, tmp_path: Path) -> None:
    started = tmp_path / "import"
    hanging = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    install(nemo_gym=hanging)
    words = [sys.executable, "-m", "nemo_ext.cli", "doctor", "nemo_gym"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        while not (started.exists() and started.read_text()):
            assert doctor.poll() is None
            time.sleep(0.02)
        doctor.send_signal(signal.SIGINT)
        output = doctor.communicate(timeout=30)

    assert doctor.returncode == 130
    assert output == ("", "")
    assert ended(int(started.read_text()))


def test_an_engine_may_print_what_it_likes(install: Install) -> None:
    install(nemo_gym="print('welcome' * 10_000)", nemo_gym__base_resources_server="SimpleResourcesServer = 1")

    assert find("nemo_gym").usable


# GPUs


def test_gpus_are_named_and_what_needs_them_is_usable(install: Install) -> None:
    install(torch=torch_with((9, 0), (9, 0)), causal_conv1d="causal_conv1d_fn = 1", **TRANSFORMER_ENGINE)

    findings = {finding.name: finding for finding in examine(["causal_conv1d", "transformer_engine"])}

    assert findings["cuda"].note == "2 x GPU 90, compute capability 9.0, 80.0 GiB"
    assert all(findings[name].usable for name in ("cuda", "causal_conv1d", "transformer_engine"))


def test_a_gpu_that_torch_was_not_built_for_is_not_usable(install: Install) -> None:
    no_kernel = "(_ for _ in ()).throw(RuntimeError('no kernel image is available for execution on the device'))"
    install(torch=torch_with((12, 0), sums=no_kernel))

    cuda = find("cuda")

    assert not cuda.usable
    assert "no kernel image" in cuda.missing
    assert "GPU 120" in cuda.note


def test_a_gpu_engine_without_a_gpu_lacks_the_gpu(install: Install) -> None:
    install(torch=torch_with(), causal_conv1d="causal_conv1d_fn = 1")

    findings = {finding.name: finding for finding in examine(["causal_conv1d", "vllm"])}

    for name in ("causal_conv1d", "vllm"):
        assert not findings[name].usable
        assert findings[name].missing.startswith(findings["cuda"].missing)
    assert findings["causal_conv1d"].command == findings["cuda"].command


@pytest.fixture
def driver(programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes NVIDIA's driver look installed."""
    programs(**{"nvidia-smi": ""})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
def test_hidden_gpus_are_to_be_shown(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(torch=torch_with())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    cuda = find("cuda")

    assert "CUDA_VISIBLE_DEVICES='-1'" in cuda.missing
    assert cuda.command == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.usefixtures("driver")
def test_a_cpu_build_of_torch_beside_a_driver_is_to_be_replaced(install: Install) -> None:
    install(torch=torch_with() + "version.cuda = None")

    cuda = find("cuda")

    assert cuda.missing == "a CUDA build of torch"
    assert cuda.command.startswith("pip install --force-reinstall torch")


@pytest.mark.usefixtures("driver")
def test_torchs_own_reason_is_told(install: Install) -> None:
    warning = "import warnings; cuda.is_available = lambda: warnings.warn('the NVIDIA driver is too old')"
    install(torch=torch_with() + warning)

    assert "driver is too old" in find("cuda").missing


def test_vllm_says_where_our_plug_in_is_left_out(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(torch=torch_with((9, 0)), vllm="LLM = 1")
    probed = cache(probe)  # what is here stays
    monkeypatch.setattr("nemo_ext.doctor.probe", lambda engine, **_: probed(engine))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert (find("vllm").usable, find("vllm").note) == (True, "")

    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert find("vllm").note == "VLLM_PLUGINS=lora_resolver excludes nemo_ext's plug-in"

    monkeypatch.setattr("nemo_ext.doctor.importlib.metadata.entry_points", lambda group: [])
    assert "as nemo_ext is not installed" in find("vllm").note


def test_megatron_bridge_lacks_transformer_engine(install: Install) -> None:
    install(
        torch=torch_with((9, 0)),
        transformer_engine="raise ImportError('no core library')",
        megatron__core="",
        megatron__training="",
        megatron__core__models__hybrid__hybrid_model="HybridModel = 1",
        megatron__bridge="AutoBridge = 1",
    )

    findings = {finding.name: finding for finding in examine(["megatron-bridge"])}

    assert findings["megatron-core"].usable
    assert findings["megatron-bridge"].missing == "transformer_engine"
    assert findings["megatron-bridge"].command == findings["transformer_engine"].command


# The command


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nemo_ext.cli", "doctor", *words], capture_output=True, text=True, timeout=600
    )


def test_a_part_of_this_environment_is_reported_as_it_is() -> None:
    result = command("hydra", "--json")

    report = json.loads(result.stdout)
    (hydra,) = report["base"]
    assert result.returncode == 0
    assert (report["works"], report["engines"]) == (True, [])
    assert hydra["version"] == importlib.metadata.version("hydra-core")
    assert hydra["usable"] and hydra["enables"]


@pytest.mark.deep
def test_this_environment_is_reported_as_it_is() -> None:
    result = command("--json", "--time-limit", "300")

    report = json.loads(result.stdout)
    base = {finding["name"]: finding for finding in report["base"]}
    engines = {finding["name"]: finding for finding in report["engines"]}
    assert result.returncode == 0
    assert report["works"] is True
    assert tuple(base) == BASE
    assert {*base, *engines} == {*BASE, *(engine.name for engine in ENGINES)}
    for name, distribution in {"torch": "torch", "megatron-core": "megatron-core", "hydra": "hydra-core"}.items():
        assert base[name]["usable"]
        assert base[name]["version"] == importlib.metadata.version(distribution)
    for finding in [*base.values(), *engines.values()]:
        assert finding["usable"] == (not finding["missing"]) == (not finding["command"])
        assert finding["enables"]


def test_a_broken_torch_ends_with_code_1(install: Install) -> None:
    install(torch="raise ImportError('libcudart.so.13: cannot open shared object file')")

    result = command("megatron-core", "--json")

    report = json.loads(result.stdout)
    torch, megatron = report["base"]
    assert result.returncode == 1
    assert report["works"] is False
    assert "libcudart.so.13" in torch["missing"]
    assert megatron["missing"] == "torch"
    assert megatron["command"] == torch["command"]


def test_a_pipe_gets_plain_text(install: Install) -> None:
    install(torch=torch_with(), trl="raise ImportError")

    result = command("trl", "hydra")

    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[:3]] == ["hydra", "torch", "trl"]
    assert '      pip install --force-reinstall --no-deps "trl>=1.16"' in result.stdout.splitlines()


def test_a_terminal_gets_a_table(install: Install) -> None:
    install(torch=torch_with())
    ours, theirs = pty.openpty()

    code = subprocess.run(
        [sys.executable, "-m", "nemo_ext.cli", "doctor", "torch", "cuda"],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        timeout=60,
    ).returncode
    os.close(theirs)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 65536).decode())
    os.close(ours)

    assert code == 0
    assert "enables" in shown
    assert "─" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["megatron"], "unknown engine megatron; known: python, hydra, torch"),
        (["--time-limit", "0"], "--time-limit must be above 0 seconds, not 0"),
        (["--yaml"], "unrecognized arguments: --yaml"),
    ],
)
def test_a_mistake_ends_with_code_2(words: list[str], said: str, command: Callable[..., Any]) -> None:
    code, out, err = command("doctor", *words)

    assert (code, out) == (2, "")
    assert said in err


def test_only_what_is_required_decides() -> None:
    good = Finding(name="trl", version="1", usable=True, required=False, enables="")

    assert works([good, good._replace(usable=False), good._replace(required=True)])
    assert not works([good._replace(required=True, usable=False)])


def test_the_launchers_import_no_torch() -> None:
    script = "import sys, launchers.describe, launchers.doctor; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_megatron_newer_than_any_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_ext.megatron import versions

    asked = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert f"<{versions.spelled(UNTESTED_MEGATRON)}" in asked["project"]["optional-dependencies"]["engine"][0]
    monkeypatch.setattr(versions, "installed", lambda: (*UNTESTED_MEGATRON, 0))

    with pytest.raises(
        ValueError, match=r"megatron-core 0.21.0 is newer than the versions tested .* or 'megatron-core<0.21'"
    ):
        require("torch", "megatron-core")
    require("torch")
    monkeypatch.setenv("NEMO_EXT_UNTESTED", "1")
    require("torch", "megatron-core")


REQUIRE = "from nemo_ext.engines import require\nrequire('torch')"


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (None, "this job requires torch: pip install 'nemo_ext[engine]'"),
        ("raise OSError('libcudart.so.13: cannot open')", "cannot be imported (libcudart.so.13: cannot open): see"),
        ("raise ImportError('undefined symbol')", "cannot be imported (undefined symbol): see"),
    ],
    ids=["a bare folder", "OSError", "ImportError"],
)
def test_a_job_is_refused_where_torch_is_none(install: Install, torch: str | None, said: str) -> None:
    site = install() if torch is None else install(torch=torch)
    (site / "torch").mkdir(exist_ok=True)
    # Without what is installed, where a bare folder is hidden by the real one.
    code = f"import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n{REQUIRE}"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert said in ended.stderr.splitlines()[-1]
