"""Checks which engines work on this machine, and names the first thing that each of the others lacks."""

import importlib.metadata
import os
import platform
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.engines import ENGINES, TIME_LIMIT, Engine, Outcome, probe
from nemo_ext.install import fits
from nemo_ext.job.job import Command

FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for FP8 matrix multiplication (Ada, Hopper and later)."""

GPU_MISSING = "an NVIDIA GPU"

PLUGINS = "vllm.general_plugins"
"""Entry points that vLLM calls in each of its processes."""

BASE = ("python", "hydra", "torch", "cuda", "fp8", "megatron-core")
"""Base that everything else builds on, listed first in the report, in this order."""

_DISTRIBUTIONS = {"absl": "absl-py", "yaml": "pyyaml", "math_verify": "math-verify", "amp_C": "apex"}
"""Distribution names of modules whose distribution has another name."""


@dataclass(frozen=True)
class Finding:
    """Result for one engine: `missing` and `command` are empty if it is usable, `note` adds limits or devices."""

    name: str
    version: str | None
    usable: bool
    required: bool
    enables: str
    missing: str = ""
    command: str = ""
    note: str = ""


def examine(names: Iterable[str] = (), *, time_limit: float = TIME_LIMIT) -> list[Finding]:
    """Probes engines, several at a time, and finds what each lacks.

    Args:
        names: Engines to probe, together with all that they need; empty for all.
        time_limit: Seconds for each import.

    Returns:
        Findings in the order of `BASE` and then `ENGINES`.

    Raises:
        ValueError: for an unknown name.
    """
    known = {engine.name: engine for engine in ENGINES}
    wanted = set(names) or {*BASE, *known}
    if unknown := wanted - {*BASE, *known}:
        raise ValueError(f"unknown engine {', '.join(sorted(unknown))}: expected some of {', '.join([*BASE, *known])}")
    if "fp8" in wanted:
        wanted |= {"cuda", "transformer_engine"}
    for engine in reversed(ENGINES):
        if engine.name in wanted:
            wanted |= {*engine.needs, *(["cuda"] if engine.needs_gpu or engine.without_gpu else [])}
    if "cuda" in wanted:
        wanted.add("torch")
    outcomes = _probe_all([engine for engine in ENGINES if engine.name in wanted], time_limit)
    findings: dict[str, Finding] = {}
    if "python" in wanted:
        findings["python"] = _judge_python()
    for engine in ENGINES:
        if engine.name in wanted:
            findings[engine.name] = _judge(engine, outcomes[engine.name], findings, time_limit)
        if engine.name == "torch" and "cuda" in wanted:
            findings["cuda"] = _judge_cuda(outcomes["torch"], findings["torch"])
    if "fp8" in wanted:
        findings["fp8"] = _judge_fp8(outcomes["torch"], findings)
    return [findings[name] for name in dict.fromkeys([*BASE, *known]) if name in wanted]


def works(findings: Iterable[Finding]) -> bool:
    """True if everything required is usable."""
    return all(finding.usable for finding in findings if finding.required)


def _probe_all(engines: list[Engine], time_limit: float) -> dict[str, Outcome]:
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2))) as pool:
        try:
            results = pool.map(lambda engine: probe(engine, time_limit=time_limit, stop=stop), engines)
            return {engine.name: outcome for engine, outcome in zip(engines, results, strict=True)}
        except BaseException:
            stop.set()
            raise


def requirements() -> dict[str, Any]:
    """Requirements in nemo_ext's own metadata, extras included, by normalised distribution name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        lines = importlib.metadata.requires("nemo_ext") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    asked: dict[str, Any] = {}
    for line in lines:
        requirement = Requirement(line)
        requirement.marker = None
        asked.setdefault(canonicalize_name(requirement.name), requirement)
    return asked


def _judge_python() -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    try:
        asked = importlib.metadata.metadata("nemo_ext").get("Requires-Python") or ""
    except importlib.metadata.PackageNotFoundError:
        asked = ""
    usable = SpecifierSet(asked).contains(version, prereleases=True)
    lack = (
        ("", "") if usable else (f"Python {asked}", "uv venv --python 3.12   # or conda create -n nemo_ext python=3.12")
    )
    return Finding("python", version, usable, True, f"runs nemo_ext ({sys.executable})", *lack)


def _judge(engine: Engine, outcome: Outcome, findings: Mapping[str, Finding], time_limit: float) -> Finding:
    missing, command = _lack(engine, outcome, findings, time_limit)
    no_gpu = "cuda" in findings and not findings["cuda"].usable
    note = engine.without_gpu if no_gpu and not missing else ""
    if engine.name == "vllm" and not missing:
        note = _vllm_lacks_plugin()
    return Finding(engine.name, outcome.version, not missing, engine.required, engine.enables, missing, command, note)


def _vllm_lacks_plugin() -> str:
    """Why vLLM does not know our model classes, or an empty string."""
    if not any(point.name == "nemo_ext" for point in importlib.metadata.entry_points(group=PLUGINS)):
        return "without nemo_ext's plug-in, as nemo_ext is not installed beside it: pip install --no-deps nemo_ext"
    allowed = os.environ.get("VLLM_PLUGINS")
    left_out = allowed is not None and "nemo_ext" not in allowed.split(",")
    return f"VLLM_PLUGINS={allowed} leaves nemo_ext's plug-in out" if left_out else ""


def _lack(engine: Engine, outcome: Outcome, findings: Mapping[str, Finding], time_limit: float) -> tuple[str, str]:
    """First thing that an engine lacks and the command that installs it; two empty strings if it lacks nothing."""
    requirement = requirements().get(engine.distribution)
    # Quoted, as a shell would interpret `>` and `[`.
    install = engine.install.format(requirement=f'"{requirement}"' if requirement else engine.distribution)
    if engine.root_variable and not (outcome.found and outcome.whole):
        root = os.environ.get(engine.root_variable)
        given = f"; there is none in {root}" if root else engine.wrong if outcome.found else ""
        return f"a source checkout, named by {engine.root_variable}{given}", install
    if not outcome.whole:
        return engine.wrong, f"pip uninstall -y {engine.distribution} && {install}"
    for name in engine.needs:
        if not findings[name].usable:
            return name, findings[name].command
    if engine.needs_gpu and not findings["cuda"].usable:
        lack = findings["cuda"].missing
        if lack == GPU_MISSING and not outcome.found:
            return f"{lack}; on a machine with one, also the package", install
        return lack, findings["cuda"].command
    if not outcome.found:
        return f"the package {engine.distribution}", install
    if requirement is not None and outcome.version and not fits(outcome.version, requirement):
        return f"{engine.distribution}{requirement.specifier} (here: {outcome.version})", install
    if outcome.timed_out:
        return f"time: {outcome.error}", f"nemo-ext doctor {engine.name} --time-limit {10 * time_limit:g}"
    if not outcome.error:
        return "", ""
    if outcome.module and not outcome.module.startswith(engine.module) and outcome.module not in engine.imports:
        top = outcome.module.partition(".")[0]
        return f"the module {outcome.module}, which it imports", f"pip install {_DISTRIBUTIONS.get(top, top)}"
    again = install.replace("pip install ", "pip install --force-reinstall --no-deps ")
    return f"an installation that works: {outcome.error}", again


def _judge_cuda(outcome: Outcome, torch: Finding) -> Finding:
    facts: Mapping[str, Any] = outcome.cuda or {"build": None, "devices": [], "problem": ""}
    missing, command = ("torch", torch.command) if not torch.usable else _gpu_lack(facts)
    note = _devices(facts["devices"])
    return Finding("cuda", facts["build"], not missing, False, "training on GPUs", missing, command, note)


def _devices(devices: Iterable[Mapping[str, Any]]) -> str:
    """The GPUs in words, identical ones grouped."""
    alike = Counter(
        f"{device['name']}, compute capability {'.'.join(map(str, device['capability']))}, "
        f"{device['memory_bytes'] / 2**30:.1f} GiB"
        for device in devices
    )
    return "; ".join(f"{count} x {words}" for words, count in alike.items())


def _gpu_lack(facts: Mapping[str, Any]) -> tuple[str, str]:
    """First thing that keeps torch from using a GPU, and the command that helps; empty strings if nothing does."""
    if facts["devices"]:
        return (f"GPUs that work: {facts['problem']}", "nvidia-smi") if facts["problem"] else ("", "")
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver and facts["build"] is None:
        return "a CUDA build of torch", "pip install --force-reinstall torch --index-url https://pypi.org/simple"
    if driver and hidden is not None and not hidden.replace("-1", "").strip(", "):
        return f"visible GPUs: CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    if driver:
        return f"GPUs that torch can reach: {facts['problem'] or 'it sees none'}", "nvidia-smi"
    slurm = shutil.which("srun") is not None
    return GPU_MISSING, f"{'srun --gpus=1 ' if slurm else ''}nemo-ext doctor   # on a machine with one"


def _judge_fp8(outcome: Outcome, findings: Mapping[str, Finding]) -> Finding:
    devices = (outcome.cuda or {}).get("devices", [])
    lowest = min(devices, key=lambda device: device["capability"], default=None)
    missing = command = ""
    if not findings["cuda"].usable:
        missing, command = findings["cuda"].missing, findings["cuda"].command
    elif lowest is not None and tuple(lowest["capability"]) < FP8_CAPABILITY:
        capability = ".".join(map(str, lowest["capability"]))
        missing = f"compute capability 8.9 (Ada, Hopper or later): {lowest['name']} has {capability}"
        command = "precision=bf16   # in nemo-ext train"
    elif not findings["transformer_engine"].usable:
        missing, command = "transformer_engine", findings["transformer_engine"].command
    return Finding("fp8", None, not missing, False, "training in FP8", missing, command)


def _main(words: list[str]) -> None:
    from launchers.doctor import main

    main()


DOCTOR = Command(
    name="doctor", group="cluster", help="show which engines work on this machine, and what the others lack", main=_main
)
