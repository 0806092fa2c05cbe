"""Settings of a Slurm job, and the division of its arguments into site and queue settings and job settings."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.config import check_choice, compose, config_folders
from nemo_ext.job.registry import jobs
from nemo_ext.job.settings import STRICT, Place, checked
from nemo_ext.slurm.cluster import Cluster, duration

OWN = ("job", "account", "time")
_NAMES = re.compile(r"[A-Za-z0-9_.@+][A-Za-z0-9_.@+-]*(,[A-Za-z0-9_.@+][A-Za-z0-9_.@+-]*)*")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Keeping:
    """Settings for restarts, nodes and sbatch options, which hydra_conf/slurm.yaml explains."""

    margin: NonNegativeInt
    max_restarts: NonNegativeInt
    max_idle: PositiveInt
    requeue: bool
    nodes: PositiveInt = 1
    shards: PositiveInt = 1
    folder: Place | None = None
    rehearse: bool | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Site and queue settings.

    Attributes:
        job: name of the nemo-ext job.
        account: account to charge; None for Slurm's default.
        time: time limit of each start; None for the maximum of the quality of service.
        cluster: description of the site.
        slurm: restarts, nodes and sbatch options.
    """

    job: str
    account: str | None
    time: str | None
    cluster: Cluster
    slurm: Keeping

    def __post_init__(self) -> None:
        if self.time is not None:
            duration(self.time)
        cluster = self.cluster
        named = {"account": self.account, "cluster.partition": cluster.partition, "cluster.qos": cluster.qos}
        for key, name in named.items():
            if name is not None and not _NAMES.fullmatch(name):
                raise ValueError(
                    f"{key}={name!r} is not a valid name in Slurm: use only letters, digits and . _ - @ + "
                    "(separate several with commas)"
                )
        known = {job.name: job for job in jobs()}
        if self.slurm.folder is not None and self.job in known and known[self.job].ranks == "slurm":
            raise ValueError(
                f"slurm.folder={self.slurm.folder}: training records its starts in run_dir; remove slurm.folder"
            )
        sharded = [job.name for job in known.values() if job.array is not None and job.array.shards]
        if self.slurm.shards > 1 and self.job not in sharded:
            raise ValueError(
                f"slurm.shards={self.slurm.shards}: job={self.job} cannot be sharded; jobs that can: "
                f"{', '.join(sharded)}"
            )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into site and queue settings on the one hand and job settings on the other.

    `--config-dir DIR` goes to both.

    Raises:
        ValueError: a config folder does not exist.
    """
    folders, words = config_folders(words)
    both = [f"--config-dir={folder}" for folder in folders]
    ours, theirs = list(both), list(both)
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        mine = name in (*OWN, "cluster") or name.startswith(("cluster.", "slurm."))
        (ours if mine else theirs).append(word)
    return ours, theirs


def settings_of(words: Sequence[str]) -> Settings:
    """Compose the site and queue settings from their arguments.

    Raises:
        ValueError: a value is invalid; the message names the key, its value and the allowed values.
    """
    check_choice("cluster", words)
    config: Mapping[str, Any] = compose("slurm", words)
    return checked(Settings, config, where="submit")
