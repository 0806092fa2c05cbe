"""Commands by name, from the entry points of installed packages. Standard library only."""

import tomllib
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import nemo_ext
from nemo_ext.job.job import Command, Grammar, Job
from nemo_ext.job.words import nearest

GROUP = "nemo_ext.jobs"
"""Entry points `NAME = "module:COMMAND"` whose objects are `Command` or `Job`."""


@cache
def ours(group: str) -> dict[str, EntryPoint]:
    """Entry points of this package: of a checkout by its pyproject.toml, which is newer than what pip has noted."""
    project = Path(nemo_ext.__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        points = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
        return {name: EntryPoint(name, value, group) for name, value in points.get(group, {}).items()}
    return {point.name: point for point in metadata.distribution("nemo_ext").entry_points if point.group == group}


@cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """Entry points of all installed packages by name.

    Raises:
        ValueError: two packages have one of the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in (*ours(group).values(), *metadata.entry_points(group=group)):
        # Of this package pip may have noted others than a checkout has.
        if found.setdefault(point.name, point).value != point.value and point.name not in ours(group):
            raise ValueError(
                f"two packages have {point.name} in {group}: {found[point.name].value} and {point.value}: uninstall one"
            )
    return found


@cache
def _load(point: EntryPoint) -> Command:
    command = point.load()
    if not isinstance(command, Command) or point.name not in (command.name, command.config):
        raise ValueError(f"entry point {point.name} = {point.value} of {GROUP}: not a Job or Command of that name")
    return command


def commands() -> list[Command]:
    """All commands of installed packages, by name."""
    return [_load(point) for _, point in sorted(entry_points(GROUP).items())]


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
    point = ours(GROUP).get(config) or entry_points(GROUP).get(config)
    if point is not None and _load(point).config in ("", config):
        return _load(point)
    return next((each for each in commands() if each.config == config), None)
