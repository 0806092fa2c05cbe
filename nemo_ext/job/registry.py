"""Commands by name, from the entry points of installed packages. Standard library only."""

import sys
import tomllib
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import nemo_ext
from nemo_ext.job.job import GROUPS, Command, Grammar, Job
from nemo_ext.job.words import nearest

GROUP = "nemo_ext.jobs"
"""Entry points `NAME = "module:COMMAND"` whose objects are `Command` or `Job`."""


@cache
def ours(group: str) -> dict[str, EntryPoint]:
    """Entry points of this package: of a checkout by its pyproject.toml, which is newer than what pip has noted."""
    file = Path(nemo_ext.__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    if project.get("name") == "nemo_ext":
        points = project.get("entry-points", {}).get(group, {})
        return {name: EntryPoint(name, value, group) for name, value in points.items()}
    with suppress(metadata.PackageNotFoundError):
        return {point.name: point for point in metadata.distribution("nemo_ext").entry_points if point.group == group}
    return {}


@cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """Entry points of all installed packages by name, ours first.

    A name that is taken is left to the package that has it, with a line on stderr.
    """
    found = dict(ours(group))
    for point in metadata.entry_points(group=group):
        package = point.dist.name if point.dist else "a package"
        if package.replace("-", "_") == "nemo_ext":
            continue  # pip may have noted others than a checkout has
        if found.setdefault(point.name, point) is not point:
            print(
                f"{package}: {point.name} of {group} is not used: {found[point.name].value} has that name",
                file=sys.stderr,
            )
    return found


@cache
def _load(point: EntryPoint) -> Command:
    """The command of an entry point.

    Raises:
        ValueError: it cannot be imported, or is not a command of that name.
    """
    try:
        command = point.load()
    except Exception as error:  # whatever a package of others does when it is imported
        raise ValueError(f"{point.name} = {point.value} of {GROUP} cannot be imported: {error}") from error
    known = (command.name, command.config) if point.name in ours(GROUP) else (getattr(command, "name", None),)
    if not isinstance(command, Command) or point.name not in known:
        raise ValueError(f"{point.name} = {point.value} of {GROUP} is not a Job or Command of that name")
    if command.group not in GROUPS:
        raise ValueError(
            f"{point.name} = {point.value} of {GROUP}: group={command.group!r}: {nearest(command.group, GROUPS)}"
        )
    return command


@cache
def commands() -> tuple[Command, ...]:
    """All commands of installed packages, by name; those of others that cannot be loaded are reported on stderr."""
    found = []
    for name, point in sorted(entry_points(GROUP).items()):
        try:
            found.append(_load(point))
        except ValueError as error:
            if name in ours(GROUP):
                raise
            print(error, file=sys.stderr)
    return tuple(found)


def command(name: str) -> Command:
    """The command `nemo-ext NAME`.

    Raises:
        ValueError: there is none.
    """
    point = ours(GROUP).get(name) or entry_points(GROUP).get(name)
    if point is None or not _load(point).group:
        known = [each.name for each in commands() if each.group]
        lack = "" if known else ": install nemo_ext again, as its commands are not registered (pip install -e .)"
        raise ValueError(f"there is no job {name!r}{lack or f': {nearest(name, known)}'}")
    return _load(point)


def jobs() -> list[Job]:
    """All jobs of installed packages, by name."""
    return [each for each in commands() if isinstance(each, Job)]


def job(name: str) -> Job:
    """The job of a name.

    Raises:
        ValueError: there is none.
    """
    found = command(name) if name in entry_points(GROUP) else None
    if not isinstance(found, Job):
        raise ValueError(f"job={name}: {nearest(name, [each.name for each in jobs()])}")
    return found


def grammar_of(config: str) -> Grammar:
    """Keys of the command line of a primary config, empty for a config that no command has."""
    return found.grammar if (found := with_config(config)) else Grammar()


def with_config(config: str) -> Command | None:
    """The command that composes a primary config."""
    if not config:
        return None
    point = ours(GROUP).get(config) or entry_points(GROUP).get(config)
    if point is not None and _load(point).config in ("", config):
        return _load(point)
    return next((each for each in commands() if each.config == config), None)
