"""Description of a site (`hydra_conf/cluster`), and of how commands run on its nodes."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from typing import Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.ranks import GPUS
from nemo_ext.job.settings import STRICT, Place

_TIME = re.compile(r"(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Limit:
    """Limits of a quality of service.

    Attributes:
        time: maximum run time in Slurm's notation, such as 24:00:00 or 4-00:00:00.
        nodes: maximum number of nodes; None if there is no limit.
    """

    time: str
    nodes: PositiveInt | None = None

    def __post_init__(self) -> None:
        duration(self.time)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Node:
    """Hardware of each node.

    Attributes:
        gpus: number of GPUs; one rank runs on each.
        gpu: model name of the GPUs.
        gpu_memory_gib: memory of each GPU in GiB; None for simulated GPUs.
        fp8: FP8 scaling recipes that the GPUs support (`precision_plan.recipe`), and `nvfp4` from Blackwell on; empty
            for GPUs without FP8.
        cpus: number of CPU cores.
    """

    gpus: PositiveInt
    gpu: str
    gpu_memory_gib: PositiveFloat | None
    fp8: tuple[Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"], ...]
    cpus: PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Container:
    """Container that commands run in.

    Attributes:
        runtime: none, singularity, apptainer, or pyxis (options of srun).
        image: image file or registry name; None to use no container.
        options: options of the runtime, such as --nv.
        binds: host folders to mount; `$NAME` is expanded on the node, and a folder is skipped if NAME is not set.
    """

    runtime: Literal["none", "singularity", "apptainer", "pyxis"] = "none"
    image: Place | None = None
    options: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.runtime == "none" and self.image is not None:
            raise ValueError(
                f"container.image={self.image} requires a container.runtime: set it to singularity, apptainer or pyxis"
            )

    @property
    def used(self) -> bool:
        """True if commands run in a container."""
        return self.runtime != "none" and self.image is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cluster:
    """Description of a site.

    Attributes:
        name: name of the config file.
        partition: partition for jobs; None for Slurm's default.
        qos: quality of service, a key of `limits`; None for the first, which is the partition's default.
        limits: mapping from quality of service to its limits; empty if unknown.
        node: hardware of each node; None if unknown.
        internet: whether compute nodes have internet access; if not, Hugging Face's libraries only use their cache.
        container: container that commands run in.
        environment: environment variables for every rank.
    """

    name: str
    partition: str | None = None
    qos: str | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    node: Node | None = None
    internet: bool = True
    container: Container = field(default_factory=Container)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def limit(self) -> Limit | None:
        """Limits of the requested quality of service; None if unknown."""
        return self.limits.get(self.qos or next(iter(self.limits))) if self.limits else None

    def variables(self) -> dict[str, str]:
        """Environment variables for every rank; values that the user has set take precedence."""
        offline = {} if self.internet else dict.fromkeys(OFFLINE, "1")
        values = {name: os.environ.get(name, value) for name, value in {**offline, **self.environment}.items()}
        if self.node is None:
            return values
        # Not taken from the user's environment: a value set for CPU training on a login node would apply to all ranks.
        return {GPUS: "none" if self.node.gpu_memory_gib is None else self.node.gpu, **values}

    def inside(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Wrap a command so that srun starts it in the container, if there is one.

        Singularity and Apptainer inherit the host's variables, except those that the image sets, so `environment` is
        also passed with --env.
        """
        container = self.container
        if not container.used or container.runtime == "pyxis":
            return list(command)
        assert container.image is not None
        binds = [word for place in self.binds() for word in ("--bind", place)]
        variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        return [container.runtime, "exec", *container.options, *binds, *variables, container.image, *command]

    def srun_options(self) -> list[str]:
        """Options with which srun starts a Pyxis container; empty without one."""
        container = self.container
        if not container.used or container.runtime != "pyxis":
            return []
        mounts = (
            [f"--container-mounts={','.join(f'{place}:{place}' for place in self.binds())}"] if self.binds() else []
        )
        return [f"--container-image={container.image}", *mounts, "--no-container-mount-home", *container.options]

    def binds(self) -> list[str]:
        """Host folders to mount in the container, with variables expanded."""
        places = [os.path.expandvars(place) for place in self.container.binds]
        return [place for place in places if not place.startswith("$")]


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that restrict Hugging Face's libraries to their cache."""


def duration(text: str) -> timedelta:
    """Parse a duration in Slurm's notation: MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Raises:
        ValueError: the text has a different format. A plain number of minutes is rejected, as 30 and 30:00 are easily
            confused.
    """
    found = _TIME.fullmatch(text) or _DAYS.fullmatch(text)
    if found is None:
        raise ValueError(f"time={text!r}: expected HH:MM:SS or D-HH:MM:SS, such as 24:00:00")
    return timedelta(**{unit: int(number) for unit, number in found.groupdict().items() if number})


_CALLERS = re.compile(
    r"(?:SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SCONTROL|SACCT|SINFO|PMI\w*?)_.*|NEMO_EXT_(?:ON_NODES|SAVE_BY)"
)
"""Pattern of variables, of a calling job or the user, that would change a Slurm command's output or target, or make a
submitted job believe that it is part of the calling job."""
_OF_THE_SITE = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY")


def call(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command without the environment variables of an enclosing job or those that set options (SBATCH_*).

    Raises:
        ValueError: the command is not on PATH.
    """
    environment = {
        name: value for name, value in os.environ.items() if name in _OF_THE_SITE or not _CALLERS.fullmatch(name)
    }
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        raise ValueError(f"{words[0]} is not on PATH; use a login node of the cluster") from None
