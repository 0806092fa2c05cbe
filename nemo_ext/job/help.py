"""Text of `nemo-ext JOB --help`: the config's introduction, further settings, and the job's config groups."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

import yaml
from omegaconf import DictConfig

from nemo_ext.job.job import Command
from nemo_ext.job.keys import choices, description

_WIDTH = 120
_INDENT = 34
_ELSEWHERE = ("defaults", "hydra")
"""Sections of a config file that do not hold a job's settings."""
_SOURCE = re.compile(r"\bsection \d|^\(choice\)")
"""Pattern of comments that cite a value's source rather than describe the key."""


def help_text(command: Command, config: DictConfig, options: Mapping[str, Sequence[str]]) -> str:
    """Text that `--help` prints for a command that composes a config.

    Args:
        config: the command's composed config, including section `hydra`.
        options: mapping from the key that selects a config file to the names of the files it can select.
    """
    shown = config.hydra.help
    intro = str(shown.template if "powered by Hydra" in str(shown.header) else shown.header)
    parts = [intro.strip()]
    if settings := list(_settings(command, _explained(intro))):
        parts.append("\n".join(["Further settings with their defaults:", *settings]))
    if options:
        lines = [_entry(f"{key}=", ", ".join(names)) for key, names in options.items()]
        parts.append("\n".join(["Config files by name; --config-dir DIR adds the files DIR/GROUP/NAME.yaml:", *lines]))
    return "\n\n".join(parts)


def _settings(command: Command, explained: Sequence[str]) -> Iterator[str]:
    """Yield an entry for each key in the command's config files that is not in `explained`, its introduction's keys."""
    # A job's own file may set a key of an included file to another default.
    rows = {
        key: (default, comment) for key, default, comment in keys_of(command.configs, command.config or command.name)
    }
    for key, (default, comment) in rows.items():
        shown = next((name for name, meant in command.grammar.aliases.items() if meant == key), key)
        if any(shown == name or (name.endswith(".") and key.startswith(name)) for name in explained):
            continue
        described = (
            description(command.grammar.settings, key).rstrip(".").replace("None", "null").replace("True to ", "true: ")
        )
        about = f"{described} ({comment})" if described and _SOURCE.search(comment) else comment or described
        words = choices(command.grammar.settings, key)
        listed = f"[{', '.join(words)}]" if any(word not in about for word in words) else ""
        yield _entry(f"{shown}={default}", f"{about} {listed}".strip())


def keys_of(package: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default, comment) for a config file and the files that it includes at the top level."""
    place = files(package) / f"{name}.yaml"
    text = place.read_text()
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        return
    for item in (yaml.safe_load(text) or {}).get("defaults", ()):
        if isinstance(item, str) and item != "_self_":
            yield from keys_of(package, item)
    yield from _below(root, text.splitlines(), "")


def _below(node: yaml.MappingNode, lines: Sequence[str], above: str) -> Iterator[tuple[str, str, str]]:
    for key_node, value in node.value:
        key = f"{above}{key_node.value}"
        if key in _ELSEWHERE:
            continue
        line = lines[key_node.start_mark.line]
        flow = isinstance(value, yaml.CollectionNode) and value.flow_style
        if isinstance(value, yaml.MappingNode) and not flow:
            yield from _below(value, lines, f"{key}.")
            continue
        default, _, comment = line[key_node.end_mark.column + 1 :].partition(" #")
        yield key, default.strip() if flow or isinstance(value, yaml.ScalarNode) else "[...]", comment.strip()


def _explained(intro: str) -> list[str]:
    """Keys that an introduction explains on their own lines; a prefix that ends in a dot covers all keys below it."""
    names = []
    for line in intro.splitlines():
        if found := re.match(r" {2,4}((?:[a-z_]\w*\.)*[\w*]+(?:, [\w.]+)*)(?:=\S+)? ", line):
            first, *others = found[1].split(", ")
            section = first.rpartition(".")[0]
            names += [first, *(other if "." in other or not section else f"{section}.{other}" for other in others)]
    return [re.sub(r"(\*|[A-Z]+)$", "", name) for name in names]


def _entry(key: str, about: str) -> str:
    """Format a key and its description as a wrapped entry of the help text."""
    first = f"  {key}".ljust(_INDENT)
    lines = textwrap.wrap(about, _WIDTH - _INDENT) or [""]
    start = [first + lines[0]] if first.endswith(" ") else [first, " " * _INDENT + lines[0]]
    return "\n".join([line.rstrip() for line in (*start, *(" " * _INDENT + line for line in lines[1:]))]).rstrip()
