"""What an installation of nemo_ext would change here, and commands that change nothing else.

It runs before anything is installed: from the wheel alone, with the standard library. No package is imported; versions
come from metadata, and pip resolves without installing.
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
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import nemo_ext
from nemo_ext.engines import ENGINES, folder_of, require
from nemo_ext.job.job import Config, Job
from nemo_ext.job.words import nearest

TIME_LIMIT = 300.0
"""Default time limit of the resolution in seconds: pip before 24.1 downloads what would be new."""

MODULES = {engine.distribution: engine.module for engine in ENGINES if engine.name != "hydra"}
MODULES |= {"nemo-toolkit": "nemo", "ray": "ray", "triton": "triton", "flash-attn": "flash_attn"}
IMAGE = re.compile(r"NVIDIA_(PYTORCH_VERSION|PRODUCT_NAME|BUILD_ID)|(CUDA|NEMO_\w*)_VERSION|(PIP|UV)_CONSTRAINT")
"""Environment variables that describe an image; none holds a secret outside of an address."""
TREE = "source tree"


def report(extras: list[str], *, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """The report as JSON has it.

    Args:
        extras: Extras that are to be installed.
        time_limit: Seconds for the resolution.

    Raises:
        ValueError: an extra does not exist.
    """
    requires, chosen = requirements(), list(dict.fromkeys(extra.replace("-", "_") for extra in extras))
    if unknown := [extra for extra in chosen if extra not in requires]:
        raise ValueError(f"there is no extra {unknown[0]!r}: {nearest(unknown[0], requires)}")
    wanted = _wanted(["base", *chosen], requires)
    found = {canonical(each.name or ""): each for each in reversed([*distributions()]) if each.version}
    engines = {name: built for name, module in MODULES.items() if (built := _engine(found.get(name), module))}
    known = {**dict.fromkeys(engines, TREE), **{name: each.version for name, each in found.items()}}
    new, error = _plan(wanted, time_limit)
    changed = {name: f"{known[name]} -> {new.pop(name)}" for name in [*new] if name in known}

    place, pip = Path(nemo_ext.__file__).absolute().parents[1], f"{shlex.quote(sys.executable)} -m pip"
    install = f"{pip} install{' --no-build-isolation' if 'gpu' in chosen else ''}"
    suffix = f"[{','.join(chosen)}]" if chosen else ""
    target = shlex.quote(f"{place if place.suffix == '.whl' else 'nemo_ext'}{suffix}")
    ways = {"This changes nothing that is here": [f"{install} {target}"]}
    if error or changed:
        freeze = f"{pip} list --format=freeze --exclude nemo_ext > here.txt"
        careful = [freeze, f"{install} -c here.txt {target}"]
        ways = {} if TREE in str(changed) else {"This refuses rather than change what is here": careful}
        absent = shlex.join(line for line in wanted if canonical(re.split(r"[^\w.-]", line)[0]) not in known)
        attempt = f'{freeze}; {install} -c here.txt "$each" || echo "left out: $each"'
        rest = [f"{install} --no-deps {target}", f"for each in {absent}; do {attempt}; done"]
        ways["This installs what fits beside what is here, and names what it leaves out"] = rest
    told = {"nemo_ext": nemo_ext.__version__, "command": shlex.join(["nemo-ext", "doctor", *sys.argv[1:]])}
    here = {"python": f"{platform.python_version()}, {sys.executable}", "pip": known.get("pip", "")}
    marks = {name: os.environ[name] for name in os.environ if IMAGE.fullmatch(name)}
    here |= {"platform": platform.platform(), **marks}
    plan = {"changed": changed, "new": new, "error": error, "changes": None if error else bool(changed), "ways": ways}
    return {**told, "here": here, "engines": engines, **plan}


def text(told: dict[str, Any]) -> str:
    """The report in lines; an issue can begin with it."""
    lines = [f"nemo_ext {told['nemo_ext']}: {told['command']}"]
    for title in filter(told.get, ("here", "engines", "changed", "new")):
        lines += ["", title, *(f"  {name:<18} {value}" for name, value in told[title].items())]
    lines += ["", told["error"]] if told["error"] else []
    for way, commands in told["ways"].items():
        lines += ["", f"{way}:", " &&\n".join(f"    {command}" for command in commands)]
    return "\n".join(lines)


def shown(report: str) -> str:
    """A report with ~ for the user's home, and without passwords and queries of addresses."""
    home = re.escape(os.path.expanduser("~"))
    report = re.sub(rf"(?<![\w.-]){home}(?![\w.-])", "~", re.sub(rf"'{home}/", "~/'", report))
    return re.sub(r"(://[^\s?#]*)[?#][^\s,\"']*", r"\1?****", re.sub(r"://[^/\s]+@", "://****@", report))


def _plan(wanted: list[str], time_limit: float) -> tuple[dict[str, str], str]:
    """Versions of what pip would install, or its reason if it would not."""
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
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> dict[str, list[str]]:
    """Requirements of nemo_ext by extra, `base` for those that it always has."""
    requires = defaultdict[str, list[str]](list)
    for line in next((each.requires for each in distributions(name="nemo_ext")), None) or []:
        always, *extra = re.split(r"\s*(?:;|\band)\s*extra\s*==\s*", line)
        requires["".join(extra).strip("\"'").replace("-", "_") or "base"].append(always)
    return requires


def check_packages(job: Job, config: Config) -> None:
    """Refuse a job whose engines, or packages of extras, are not installed here or are too old.

    Source trees without metadata pass, and extras that the metadata of an older nemo_ext does not have.

    Raises:
        ValueError: naming the packages and the command that installs them.
    """
    engines, extras = (named(config) if callable(named) else named for named in (job.engines, job.extras))
    if extras:
        _check_extras(extras)
    if engines:
        require(*engines)


def _check_extras(extras: Sequence[str]) -> None:
    from packaging.requirements import Requirement

    lacking = []
    for line in _wanted([*extras], requirements()):
        wanted = Requirement(line)
        versions = [each.version for each in distributions(name=wanted.name)]
        if not versions and not folder_of(wanted.name.replace("-", "_")):
            lacking.append(wanted.name)
        elif versions and not wanted.specifier.contains(versions[0], prereleases=True):
            lacking.append(f"{wanted.name}{wanted.specifier}, {versions[0]} is here")
    if lacking:
        raise ValueError(f"this job needs {'; '.join(lacking)}: pip install 'nemo_ext[{','.join(extras)}]'")


def _wanted(extras: list[str], requires: dict[str, list[str]]) -> list[str]:
    """Requirements of extras, and of the extras that these name."""
    wanted, needed = list[str](), [*extras]
    for extra in needed:  # grows by the extras that an extra names
        for line in requires[extra]:
            ours = re.match(r"nemo[-_.]ext\s*\[(.*)\]", line)
            needed += ours[1].replace("-", "_").split(",") if ours else []
            wanted += [] if ours or line in wanted else [line]
    return wanted


def _engine(installed: Distribution | None, module: str) -> str:
    """Version of an engine, and what makes it other than a release of an index; empty if it is not here."""
    tree = folder_of(module)
    if installed is None:
        return tree and f"{TREE} {tree}, without metadata: pip does not see it"
    if origin := re.search(r'"url":\s*"(?:file://)?([^"]+)"', installed.read_text("direct_url.json") or ""):
        return f"{installed.version}  LOCAL BUILD from {origin[1]}"
    if tree and not Path(tree).is_relative_to(str(installed.locate_file(""))):
        return f"{installed.version}  hidden by {tree}, which is imported in its place"
    return f"{installed.version}{'  LOCAL BUILD' if re.search(r'[a-z+]', installed.version) else ''}"
