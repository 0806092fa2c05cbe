"""Sweeps in the syntax of Hydra's `--multirun`, in which `megatron.lr=1e-4,2e-4 megatron.seed=1,2` gives four runs."""

import re
from collections.abc import Sequence
from itertools import product

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from nemo_ext.job.config import compose, hydra_value, hydra_words
from nemo_ext.job.keys import is_place
from nemo_ext.job.registry import grammar_of
from nemo_ext.slurm.settings import split

MULTIRUN = "--multirun"


def points(job: str, words: Sequence[str]) -> list[list[str]]:
    """Return the arguments for each run of a sweep, in the order of Hydra's own sweeper: the last key changes fastest.

    Each run gets a folder in the job's run directory that is named after the swept values, such as
    `megatron.lr=1e-4,megatron.seed=1`.

    Raises:
        ValueError: no key has several values, or the job has no run directory.
    """
    ours, theirs = split([word for word in words if word != MULTIRUN])
    choices = [_values(job, word) for word in theirs]
    swept = [number for number, values in enumerate(choices) if len(values) > 1]
    if not swept:
        raise ValueError(f"{MULTIRUN}: no key has several values; write, for example, megatron.lr=1e-4,2e-4")
    runs = []
    for values in product(*choices):
        run_dir = compose(job, values).get("run_dir")
        if run_dir is None:
            raise ValueError(f"{MULTIRUN}: job={job} has no run directory; submit the runs separately")
        # All runs share a parent folder, as their run directories differ only in the swept values.
        name = ",".join(re.sub("[\"']", "", values[number]).replace("/", "_") for number in swept)
        runs.append([*ours, *values, f"run_dir={hydra_value(f'{run_dir}/{name}')}"])
    return runs


def _values(job: str, word: str) -> list[str]:
    """Split a sweep override into one override per value; return any other argument unchanged, in a list."""
    if word.startswith("-"):
        return [word]
    name = word.partition("=")[0]
    parse = OverridesParser.create().parse_overrides
    try:
        # File names are plain text elsewhere; here a comma separates values, except in quotes.
        parsed = parse([word] if is_place(grammar_of(job).settings, name.lstrip("+~")) else hydra_words([word], job))
    except HydraException:
        return [word]  # composing reports the error
    if len(parsed) != 1 or not parsed[0].is_sweep_override():
        return [word]
    return [f"{name}={value}" for value in parsed[0].sweep_string_iterator()]
