"""The `nemo-ext doctor` command: shows which engines (torch, ...) work here, and what to install for the rest."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from nemo_ext import __version__, install
from nemo_ext.engines import ENGINES, TIME_LIMIT, Engine, Outcome, probe
from nemo_ext.install import canonical, requirements
from nemo_ext.job.job import Command

GPU_MISSING = "an NVIDIA GPU"

BASE = ("python", "hydra", "torch", "cuda", "megatron-core")
"""Engines that everything else depends on, listed first in the report."""

_PYTHON = Engine("python", "python", (), f"runs nemo_ext ({sys.executable})", needs=(), required=True)
_CUDA = Engine("cuda", "torch", (), "training on GPUs")
ROWS = {engine.name: engine for engine in (_PYTHON, *ENGINES[:2], _CUDA, *ENGINES[2:])}
"""Rows of the report, keyed by engine name; every row comes after the rows it requires."""

_DISTRIBUTIONS = {"absl": "absl-py", "yaml": "pyyaml", "math_verify": "math-verify", "amp_C": "apex"}
"""Mapping from a module's name to its distribution's, where they differ."""


class Finding(NamedTuple):
    """Result for one engine.

    Attributes:
        name: name of the engine.
        version: installed version; None if it is unknown or the engine is not installed.
        usable: whether nemo_ext can use the engine here.
        required: whether training is impossible without it.
        enables: features of nemo_ext that it enables.
        missing: its first missing requirement; "" if it is usable.
        command: command that provides the missing requirement; "" if the engine is usable.
        note: limits of a usable engine, or a list of the GPUs; "" if there is nothing to note.
    """

    name: str
    version: str | None
    usable: bool
    required: bool
    enables: str
    missing: str = ""
    command: str = ""
    note: str = ""


def examine(names: Iterable[str] = (), *, time_limit: float = TIME_LIMIT) -> list[Finding]:
    """Probe engines in parallel, and find their missing requirements.

    Args:
        names: Engines to probe, together with the engines that they require; empty for all.
        time_limit: Time limit for each import, in seconds.

    Returns:
        Findings in the order of `ROWS`.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = set(names) or {*ROWS}
    if unknown := wanted - {*ROWS}:
        raise ValueError(f"unknown engine {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    for engine in reversed(ROWS.values()):
        if engine.name in wanted:
            wanted |= {*engine.needs, *(["cuda"] if engine.needs_gpu or engine.without_gpu else [])}
    engines, stop = [engine for engine in ENGINES if engine.name in wanted], threading.Event()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            answers = [*pool.map(lambda engine: probe(engine, time_limit=time_limit, stop=stop), engines)]
        finally:
            stop.set()
    outcomes = {engine.name: outcome for engine, outcome in zip(engines, answers, strict=True)}
    outcomes["python"] = Outcome(found=True, version=platform.python_version())
    facts = outcomes.get("torch", outcomes["python"]).cuda or {"build": None, "devices": []}
    outcomes["cuda"] = Outcome(found=True, version=facts["build"], cuda=facts)
    findings: dict[str, Finding] = {}
    for name, engine in ROWS.items():
        if name in wanted:
            version, enables = outcomes[name].version, engine.enables
            missing, command = _missing(engine, outcomes[name], findings, time_limit)
            note = "" if missing and name != "cuda" else _note(engine, facts["devices"])
            findings[name] = Finding(name, version, not missing, engine.required, enables, missing, command, note)
    return [*findings.values()]


def works(findings: Iterable[Finding]) -> bool:
    """Return whether training works here, that is, whether all required engines are usable."""
    return all(finding.usable for finding in findings if finding.required)


def _note(engine: Engine, devices: list[Mapping[str, Any]]) -> str:
    """Describe a usable engine's limits ("" if it has none); for `cuda`, list the GPUs, such as "8 x NVIDIA H100"."""
    if engine is _CUDA:
        words = "{name}, compute capability {capability[0]}.{capability[1]}, {gib:.1f} GiB"
        alike = Counter(words.format(**device, gib=device["memory_bytes"] / 2**30) for device in devices)
        return "; ".join(f"{count} x {words}" for words, count in alike.items())
    if engine.name == "vllm":
        if not any(point.name == "nemo_ext" for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
            return "without nemo_ext's plug-in, as nemo_ext is not installed: pip install --no-deps nemo_ext"
        allowed = os.environ.get("VLLM_PLUGINS", "nemo_ext")
        return "" if "nemo_ext" in allowed.split(",") else f"VLLM_PLUGINS={allowed} excludes nemo_ext's plug-in"
    return "" if devices else engine.without_gpu


def _missing(engine: Engine, outcome: Outcome, findings: Mapping[str, Finding], time_limit: float) -> tuple[str, str]:
    """Return an engine's first missing requirement and the command that installs it; two empty strings if none is."""
    from packaging.requirements import Requirement  # `--install` runs without it

    stated = [Requirement(line) for lines in requirements().values() for line in lines]
    requirement = next((item for item in stated if canonical(item.name) == engine.distribution), None)
    # Quoted, as a shell would interpret `>` and `[`.
    command = engine.install.format(requirement=f'"{requirement}"' if requirement else engine.distribution)
    if engine.root_variable and not (outcome.found and outcome.whole):
        root = os.environ.get(engine.root_variable)
        detail = f"; there is none in {root}" if root else engine.wrong if outcome.found else ""
        return f"a source checkout, named by {engine.root_variable}{detail}", command
    if not outcome.whole:
        return engine.wrong, f"pip uninstall -y {engine.distribution} && {command}"
    for need in (*engine.needs, *(["cuda"] if engine.needs_gpu else [])):
        if not (finding := findings[need]).usable:
            if finding.missing == GPU_MISSING and not outcome.found:
                return f"{GPU_MISSING}; on a machine with one, also the package", command
            return finding.missing if need == "cuda" else need, finding.command
    if engine is _CUDA:
        return _missing_of_gpu(**(outcome.cuda or {}))
    if not outcome.found:
        return f"the package {engine.distribution}", command
    if requirement and outcome.version and not requirement.specifier.contains(outcome.version, prereleases=True):
        return f"{engine.distribution}{requirement.specifier} (installed: {outcome.version})", command
    if outcome.timed_out:
        return f"more time: {outcome.error}", f"nemo-ext doctor {engine.name} --time-limit {10 * time_limit:g}"
    if outcome.module and not outcome.module.startswith(engine.module) and outcome.module not in engine.imports:
        top = outcome.module.partition(".")[0]
        return f"the module {outcome.module}, which it imports", f"pip install {_DISTRIBUTIONS.get(top, top)}"
    reinstall = command.replace("pip install ", "pip install --force-reinstall --no-deps ")
    return (f"a working installation: {outcome.error}", reinstall) if outcome.error else ("", "")


def _missing_of_gpu(*, build: str | None, devices: list[Mapping[str, Any]], problem: str) -> tuple[str, str]:
    """Return the first reason why torch cannot use a GPU, and a command to resolve it; two empty strings if it can.

    Args:
        build: CUDA version that torch is built for; None for a build without CUDA.
        devices: GPUs that torch finds.
        problem: error message from using them; "" if there was none.
    """
    if devices:
        return (f"working GPUs: {problem}", "nvidia-smi") if problem else ("", "")
    if not shutil.which("nvidia-smi"):
        slurm = "srun --gpus=1 " if shutil.which("srun") else ""
        return GPU_MISSING, f"{slurm}nemo-ext doctor   # on a machine with one"
    if build is None:
        return "a CUDA build of torch", "pip install --force-reinstall torch --index-url https://pypi.org/simple"
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) in ("", "-1"):
        return f"visible GPUs: CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    return f"GPUs that torch can use: {problem or 'it finds none'}", "nvidia-smi"


_DESCRIPTION = """\
Show which engines work on this machine, and what the rest require; each is imported in a separate process.

Exit code 1 if hydra, torch or megatron-core does not work. With --install, before an installation: the installed
packages by their metadata, the changes that pip would make, and commands that change no installed package; exit code 1
if installed packages would change, or if that is unknown.
"""


def _main(words: list[str]) -> None:
    """Run `nemo-ext doctor`: print the findings, or the report of `--install`."""
    parser = argparse.ArgumentParser(prog="nemo-ext doctor", description=_DESCRIPTION)
    parser.add_argument("engine", nargs="*", help=f"only these and their requirements; known: {', '.join(ROWS)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="time limit of an import or of pip")
    parser.add_argument("--install", action="store_true", help="show what an installation would change")
    parser.add_argument("--extra", nargs="+", action="extend", default=[], metavar="NAME", help="extras to install")
    arguments = parser.parse_args(words)
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        parser.error(f"--time-limit must be above 0 seconds, not {arguments.time_limit:g}")
    if (arguments.install and arguments.engine) or (arguments.extra and not arguments.install):
        parser.error("--install does not accept names of engines, and --extra requires --install")
    try:
        if arguments.install:
            report = install.report(arguments.extra, time_limit=arguments.time_limit or install.TIME_LIMIT)
            print(install.shown(json.dumps(report, indent=2) if arguments.json else install.text(report)))
            sys.exit(report["changes"] is not False)
        findings = examine(arguments.engine, time_limit=arguments.time_limit or TIME_LIMIT)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if arguments.json:
        base, engines = ([row._asdict() for row in findings if (row.name in BASE) is of] for of in (True, False))
        print(
            json.dumps({"nemo_ext": __version__, "works": works(findings), "base": base, "engines": engines}, indent=2)
        )
    else:
        _print(findings)
    sys.exit(not works(findings))


def _print(findings: list[Finding]) -> None:
    """Print a table of engines, then each unusable engine's missing requirement with a command to copy."""
    from rich import box, console, table

    style = box.SIMPLE_HEAD if sys.stdout.isatty() else None
    rows = table.Table("", "version", "here", "enables", box=style, show_header=style is not None, pad_edge=False)
    for finding in findings:
        what = f"{finding.enables}: {finding.note}" if finding.note else finding.enables
        here = "[green]yes" if finding.usable else "[red]no" if finding.required else "[yellow]no"
        rows.add_row(finding.name, finding.version or "-", here, what, end_section=finding.name == BASE[-1])
    console.Console(highlight=False, width=None if style else 500).print(rows)
    for finding in (finding for finding in findings if not finding.usable):
        print(f"  {finding.name} requires {finding.missing}\n      {finding.command}")
    broken = ", ".join(finding.name for finding in findings if finding.required and not finding.usable)
    print(f"\ntraining does not work here: {broken}" if broken else "\nnemo-ext works here")


DOCTOR = Command(
    name="doctor", group="cluster", help="show which engines work here, and what the rest require", main=_main
)
