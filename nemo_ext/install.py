"""Report on the changes that installing nemo_ext would make, and commands that avoid them.

It can run before installation, from the wheel alone and with only the standard library. It imports no package: versions
come from metadata, and pip resolves the dependencies in a dry run.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import nemo_ext
from nemo_ext.engines import ENGINES, folder_of, require
from nemo_ext.job.job import Config, Job
from nemo_ext.job.words import nearest

TIME_LIMIT = 300.0
"""Default time limit of pip's resolution, in seconds; versions before 24.1 download new packages meanwhile."""

MODULES = {engine.distribution: engine.module for engine in ENGINES if engine.name != "hydra"}
MODULES |= {"nemo-toolkit": "nemo", "ray": "ray", "triton": "triton", "flash-attn": "flash_attn"}
IMAGE = re.compile(r"NVIDIA_(PYTORCH_VERSION|PRODUCT_NAME|BUILD_ID)|(CUDA|NEMO_\w*)_VERSION|(PIP|UV)_CONSTRAINT")
"""Environment variables that describe a container image; they contain no secrets, except within URLs."""
TREE = "source tree"


def report(extras: list[str], *, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Report what installing nemo_ext would change in this environment, as JSON-serialisable data.

    Args:
        extras: Names of the extras to install.
        time_limit: Time limit of pip's resolution, in seconds.

    Raises:
        ValueError: an extra does not exist.
    """
    requires, chosen = requirements(), list(dict.fromkeys(extra.replace("-", "_") for extra in extras))
    if unknown := [extra for extra in chosen if extra not in requires]:
        raise ValueError(f"unknown extra {unknown[0]!r}: {nearest(unknown[0], requires)}")
    wanted = _wanted(["base", *chosen], requires)
    installed = {canonical(item.name or ""): item for item in reversed([*distributions()]) if item.version}
    engines = {name: built for name, module in MODULES.items() if (built := _engine(installed.get(name), module))}
    known = {**dict.fromkeys(engines, TREE), **{name: item.version for name, item in installed.items()}}
    new, error = _plan(wanted, time_limit)
    changed = {name: f"{known[name]} -> {new.pop(name)}" for name in [*new] if name in known}

    place, pip = Path(nemo_ext.__file__).absolute().parents[1], f"{shlex.quote(sys.executable)} -m pip"
    install = f"{pip} install{' --no-build-isolation' if 'gpu' in chosen else ''}"
    suffix = f"[{','.join(chosen)}]" if chosen else ""
    target = shlex.quote(f"{place if place.suffix == '.whl' else 'nemo_ext'}{suffix}")
    ways = {"This changes no installed package": [f"{install} {target}"]}
    if error or changed:
        freeze = f"{pip} list --format=freeze --exclude nemo_ext > here.txt"
        careful = [freeze, f"{install} -c here.txt {target}"]
        ways = {} if TREE in str(changed) else {"This fails rather than change installed packages": careful}
        absent = shlex.join(line for line in wanted if canonical(re.split(r"[^\w.-]", line)[0]) not in known)
        attempt = f'{freeze}; {install} -c here.txt "$each" || echo "skipped: $each"'
        rest = [f"{install} --no-deps {target}", f"for each in {absent}; do {attempt}; done"]
        ways["This installs the compatible packages, and lists the ones it skips"] = rest
    head = {"nemo_ext": nemo_ext.__version__, "command": shlex.join(["nemo-ext", "doctor", *sys.argv[1:]])}
    here = {"python": f"{platform.python_version()}, {sys.executable}", "pip": known.get("pip", "")}
    marks = {name: os.environ[name] for name in os.environ if IMAGE.fullmatch(name)}
    here |= {"platform": platform.platform(), **marks}
    plan = {"changed": changed, "new": new, "error": error, "changes": None if error else bool(changed), "ways": ways}
    return {**head, "here": here, "engines": engines, **plan}


def text(report: dict[str, Any]) -> str:
    """Format the data from `report` as text, for example to paste into an issue."""
    lines = [f"nemo_ext {report['nemo_ext']}: {report['command']}"]
    for title in filter(report.get, ("here", "engines", "changed", "new")):
        lines += ["", title, *(f"  {name:<18} {value}" for name, value in report[title].items())]
    lines += ["", report["error"]] if report["error"] else []
    for way, commands in report["ways"].items():
        lines += ["", f"{way}:", " &&\n".join(f"    {command}" for command in commands)]
    return "\n".join(lines)


def shown(report: str) -> str:
    """Redact the text of a report: replace the home directory with ~, and remove credentials and queries from URLs."""
    home = re.escape(os.path.expanduser("~"))
    report = re.sub(rf"(?<![\w.-]){home}(?![\w.-])", "~", re.sub(rf"'{home}/", "~/'", report))
    return re.sub(r"(://[^\s?#]*)[?#][^\s,\"']*", r"\1?****", re.sub(r"://[^/\s]+@", "://****@", report))


def _plan(wanted: list[str], time_limit: float) -> tuple[dict[str, str], str]:
    """Return the versions that pip would install, keyed by distribution, and pip's error ("" if it succeeds).

    Args:
        wanted: requirements, as on pip's command line.
        time_limit: time limit in seconds.
    """
    options = ["--dry-run", "--quiet", "--report=-", "--no-color", "--no-input", "--timeout=5", "--retries=1"]
    command = [sys.executable, "-m", "pip", "install", *options, *wanted]
    plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    try:
        done = subprocess.run(command, env=plain, capture_output=True, text=True, errors="replace", timeout=time_limit)
    except subprocess.TimeoutExpired:
        return {}, f"pip took longer than {time_limit:g} s"
    if done.returncode:
        return {}, " ".join(done.stderr.split())[:1000]
    entries = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return {canonical(entry["name"]): entry["version"] for entry in entries}, ""


def canonical(name: str) -> str:
    """Normalise a distribution's name, as pip does to compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> dict[str, list[str]]:
    """Return nemo_ext's requirements, keyed by extra; the unconditional ones are under `base`."""
    requires = defaultdict[str, list[str]](list)
    for line in next((item.requires for item in distributions(name="nemo_ext")), None) or []:
        always, *extra = re.split(r"\s*(?:;|\band)\s*extra\s*==\s*", line)
        requires["".join(extra).strip("\"'").replace("-", "_") or "base"].append(always)
    return requires


def check_packages(job: Job, config: Config) -> None:
    """Check that the engines and the extras' packages that a job requires are installed and recent enough.

    Source trees without metadata are accepted, as are extras that the installed nemo_ext's metadata does not list.

    Raises:
        ValueError: a package is missing or too old; the message gives the command that installs it.
    """
    engines, extras = (named(config) if callable(named) else named for named in (job.engines, job.extras))
    if extras:
        _check_extras(extras)
    if engines:
        require(*engines)


def _check_extras(extras: Sequence[str]) -> None:
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    missing = []
    for line in _wanted([*extras], requirements()):
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        version = next((each.version for each in distributions(name=wanted.name) if each.version), None)
        module = MODULES.get(canonical(wanted.name), wanted.name.replace("-", "_"))
        if version is None and not folder_of(module):
            missing.append(wanted.name)
        with suppress(InvalidVersion):  # a local build
            if version is not None and not wanted.specifier.contains(Version(version), prereleases=True):
                missing.append(f"{wanted.name}{wanted.specifier} (installed: {version})")
    if missing:
        raise ValueError(f"this job requires {'; '.join(missing)}: pip install 'nemo_ext[{','.join(extras)}]'")


def _wanted(extras: list[str], requires: dict[str, list[str]]) -> list[str]:
    """Return the extras' requirements, including those of the extras that they refer to, without duplicates."""
    wanted, needed = list[str](), [*extras]
    for extra in needed:  # grows by the extras that an extra refers to
        for line in requires[extra]:
            ours = re.match(r"nemo[-_.]ext\s*\[(.*)\]", line)
            needed += ours[1].replace("-", "_").split(",") if ours else []
            wanted += [] if ours or line in wanted else [line]
    return wanted


def _engine(installed: Distribution | None, module: str) -> str:
    """Return an engine's version, with a remark if it is not a release from an index; "" if it is not installed."""
    tree = folder_of(module)
    if installed is None:
        return tree and f"{TREE} {tree}, without metadata, invisible to pip"
    if origin := re.search(r'"url":\s*"(?:file://)?([^"]+)"', installed.read_text("direct_url.json") or ""):
        return f"{installed.version}  LOCAL BUILD from {origin[1]}"
    if tree and not Path(tree).is_relative_to(str(installed.locate_file(""))):
        return f"{installed.version}  hidden by {tree}, which is imported instead"
    return f"{installed.version}{'  LOCAL BUILD' if re.search(r'[a-z+]', installed.version) else ''}"
