"""The `nemo-ext synthesize` command: generates training data with models, following a recipe."""

import re

from nemo_ext.job.job import Grammar, reads
from nemo_ext.serving.commands import asking

_NO_TEXT = re.compile(r"(?:null|true|false|-?[\d.]+(?:e-?\d+)?)?")
_SECTIONS = (
    *("require", "columns", "templates", "canaries", "user", "reference", "record"),
    *("settings", "extra", "filters"),
)


def literal(key: str, value: str) -> bool | None:
    """Return whether Hydra parses a command-line argument's value; False if the value is a template or expression.

    Return None for keys outside `steps` and `outputs`.
    """
    if not key.startswith(("steps.", "outputs.")):
        return None
    parts = key.split(".")
    section = len(parts) == 2 or parts[-1] in _SECTIONS or bool({"settings", "extra", "filters"} & set(parts[2:]))
    listed = parts[-1] == "stop" and value.startswith("[")
    return section or listed or bool(_NO_TEXT.fullmatch(value))


SYNTHESIZE = asking(
    extra="synthesize",
    name="synthesize",
    group="data",
    help="generate training data with models, by a recipe of steps: answers, verdicts, judges, filters",
    run="nemo_ext.synthesis.job:run",
    check=reads("nemo_ext.synthesis.job:check"),
    grammar=Grammar(
        settings=("nemo_ext.synthesis.settings:Settings", {"roles": {"*": "nemo_ext.synthesis.settings:Role"}}),
        aliases={"model": "served"},
        groups={"recipe": "synthesize"},
        literal=literal,
        dry_run="synthesize.dry_run",
    ),
)
