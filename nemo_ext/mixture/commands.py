"""`nemo-ext mixture`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_ext.job.config import compose
from nemo_ext.job.job import Array, Config, Grammar, Job, invoke
from nemo_ext.job.registry import job
from nemo_ext.job.settings import strings


def _check(config: Config, coming: Sequence[Path]) -> None:
    from nemo_ext.mixture.job import check

    check(config, files=not coming)


def _size(config: Config, settings: Any) -> tuple[int, int]:
    """A node with the GPUs that a small training or its evaluation takes."""
    runs = {"train": strings(config["train"]), "evaluate": ["model=small", *strings(config["evaluate"])]}
    return 1, max(invoke(job(name).size, compose(name, words), settings)[1] for name, words in runs.items())


MIXTURE = Job(
    name="mixture",
    group="data",
    help="shares of streams by small runs on sampled mixtures: losses fitted, and the best one trained",
    run="nemo_ext.mixture.job:run",
    resumable=True,
    check=_check,
    started="nemo_ext.mixture.settings:runs_of",
    script="task",
    size=_size,
    # All runs in one array, then the optimum in one task.
    array=Array(
        key="shard", words=("shard={number}/{count}",), tasks=lambda config, shards: 1, rounds=lambda config: 2
    ),
    grammar=Grammar(settings="nemo_ext.mixture.settings:Settings"),
)
