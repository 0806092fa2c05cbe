"""Registry of commands, found through the entry points of installed packages. Standard library only."""

import sys
import tomllib
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

import nemo_ext
from nemo_ext.job.job import GROUPS, Command, Grammar, Job
from nemo_ext.job.words import nearest

GROUP = "nemo_ext.jobs"
"""Entry point group whose entries, `NAME = "module:COMMAND"`, refer to a `Command` or `Job`."""

CONFIGS = "hydra_conf"
"""Package with the config groups: models, recipes, benchmarks, clusters and others."""

CONFIG_GROUP = "nemo_ext.configs"
"""Entry point group whose entries, `NAME = "package"`, name packages with more files for the same config groups."""


@cache
def ours(group: str) -> dict[str, EntryPoint]:
    """Return a mapping from name to entry point, for this package's own entry points in a group.

    In a source checkout, they are read from pyproject.toml, because the metadata that pip installed may be outdated.
    """
    file = Path(nemo_ext.__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    if project.get("name") == "nemo_ext":
        points = project.get("entry-points", {}).get(group, {})
        return {name: EntryPoint(name, value, group) for name, value in points.items()}
    with suppress(metadata.PackageNotFoundError):
        return {point.name: point for point in metadata.distribution("nemo_ext").entry_points if point.group == group}
    return {}


def _described(point: EntryPoint) -> str:
    """Describe an entry point for a message: its name, value, group and, if known, package."""
    package = f" (package {point.dist.name})" if point.dist else ""
    return f"entry point {point.name} = {point.value} in {point.group}{package}"


@cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """Mapping from name to entry point in a group, for all installed packages; ours take precedence.

    A duplicate name is ignored and reported on stderr.
    """
    points = dict(ours(group))
    for point in metadata.entry_points(group=group):
        if point.dist and point.dist.name.replace("-", "_") == "nemo_ext":
            continue  # pip's metadata may differ from the checkout
        if points.setdefault(point.name, point) is not point:
            print(
                f"{_described(point)} is ignored, as {points[point.name].value} has the same name; rename it",
                file=sys.stderr,
            )
    return points


@cache
def config_packages() -> tuple[str, ...]:
    """Names of packages with config groups: ours first, as it takes precedence. Missing ones are reported on stderr."""
    packages = [CONFIGS]
    for point in entry_points(CONFIG_GROUP).values():
        try:
            spec = find_spec(point.value)  # does not run the package's code
        except Exception:  # the package above may raise anything on import
            spec = None
        if spec is None or spec.origin is None or not spec.submodule_search_locations:
            reason = f"{point.value} is not a package with an __init__.py"
            print(f"{_described(point)} is ignored: {reason}", file=sys.stderr)
        else:
            packages.append(point.value)
    return tuple(dict.fromkeys(packages))


def config_files(group: str) -> dict[str, Traversable]:
    """Sorted mapping from name, without suffix, to the YAML file of a config group, for all packages."""
    folders = [files(package).joinpath(*group.split("/")) for package in reversed(config_packages())]
    paths = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    by_name = {path.name.removesuffix(".yaml"): path for path in paths if path.name.endswith(".yaml")}
    return dict(sorted(by_name.items()))


@cache
def _load(point: EntryPoint) -> Command:
    """Load the command that an entry point refers to."""
    try:
        command = point.load()
    except Exception as error:  # third-party packages may raise anything on import
        raise ValueError(
            f"{_described(point)} cannot be imported ({error}); update or uninstall its package"
        ) from error
    known = (command.name, command.config) if point.name in ours(GROUP) else (getattr(command, "name", None),)
    if not isinstance(command, Command) or point.name not in known:
        raise ValueError(
            f"{_described(point)} must refer to a Job or Command that has the name {point.name!r}; update or uninstall "
            "its package"
        )
    if command.group not in GROUPS:
        raise ValueError(
            f"{_described(point)} has an unknown group {command.group!r}: {nearest(command.group, GROUPS)}"
        )
    return command


@cache
def commands() -> tuple[Command, ...]:
    """All commands, sorted by name; third-party commands that cannot be loaded are reported on stderr."""
    loaded = []
    for name, point in sorted(entry_points(GROUP).items()):
        try:
            loaded.append(_load(point))
        except ValueError as error:
            if name in ours(GROUP):
                raise
            print(error, file=sys.stderr)
    return tuple(loaded)


def command(name: str) -> Command:
    """Look up the command `nemo-ext NAME`; raises ValueError if there is no such command."""
    point = ours(GROUP).get(name) or entry_points(GROUP).get(name)
    if point is None or not _load(point).group:
        known = [item.name for item in commands() if item.group]
        remedy = "" if known else ": reinstall nemo_ext, as its commands are not registered (pip install -e .)"
        raise ValueError(f"there is no job {name!r}{remedy or f': {nearest(name, known)}'}")
    return _load(point)


def jobs() -> list[Job]:
    """All jobs, sorted by name."""
    return [item for item in commands() if isinstance(item, Job)]


def job(name: str) -> Job:
    """Look up a job; raises ValueError if there is no such job."""
    found = command(name) if name in entry_points(GROUP) else None
    if not isinstance(found, Job):
        raise ValueError(f"job={name}: no such job: {nearest(name, [item.name for item in jobs()])}")
    return found


def grammar_of(config: str) -> Grammar:
    """Command line grammar for a primary config; an empty grammar if no command composes it."""
    return found.grammar if (found := with_config(config)) else Grammar()


def with_config(config: str) -> Command | None:
    """Command that composes a primary config; None if there is none."""
    if not config:
        return None
    point = ours(GROUP).get(config) or entry_points(GROUP).get(config)
    if point is not None and _load(point).config in ("", config):
        return _load(point)
    return next((item for item in commands() if item.config == config), None)
