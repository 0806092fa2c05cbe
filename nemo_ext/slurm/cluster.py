"""The facts of a site, files of `hydra_conf/cluster`, and how a command runs on its nodes."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import timedelta
from typing import Any, Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.checked import checked
from nemo_ext.data.settings import nearest

STRICT = ConfigDict(extra="forbid")
_TIME = re.compile(r"(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Limit:
    """Of a quality of service.

    Attributes:
        time: the longest, as Slurm writes it: 24:00:00, 4-00:00:00.
        nodes: the most; None where there is no bound.
    """

    time: str
    nodes: PositiveInt | None = None

    def __post_init__(self) -> None:
        duration(self.time)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Node:
    """What each node has.

    Attributes:
        gpus: how many; a rank on each.
        gpu: their name.
        gpu_memory_gib: of each; None for the simulated ones.
        fp8: the FP8 scalings that they multiply in (`precision_plan.recipe`); none for GPUs without.
        cpus: cores.
    """

    gpus: PositiveInt
    gpu: str
    gpu_memory_gib: PositiveFloat | None
    fp8: tuple[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], ...]
    cpus: PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Container:
    """How a command enters a container.

    Attributes:
        runtime: none, singularity, apptainer, or pyxis (options of srun).
        image: a file or a registry's name; None for no container.
        options: of the runtime, --nv for example.
        binds: folders of the host, `$NAME` is the variable's value on the node; one that is not set is left out.
    """

    runtime: Literal["none", "singularity", "apptainer", "pyxis"] = "none"
    image: str | None = None
    options: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.runtime == "none" and self.image is not None:
            raise ValueError(f"container.image={self.image}: container.runtime is none; say which runtime")

    @property
    def used(self) -> bool:
        """Whether there is one."""
        return self.runtime != "none" and self.image is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cluster:
    """A site.

    Attributes:
        name: of the file.
        partition: that jobs go to; None for Slurm's default.
        qos: a key of `limits`; None for the first, which the partition has by itself and no option names.
        limits: by quality of service; empty where they are not known.
        node: None where it is not known.
        internet: whether compute nodes reach it; without, caches must be there and Hugging Face's is read offline.
        environment: variables of every rank.
    """

    name: str
    partition: str | None = None
    qos: str | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    node: Node | None = None
    internet: bool = True
    container: Container = field(default_factory=Container)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.qos is not None and self.limits and self.qos not in self.limits:
            raise ValueError(f"qos={self.qos}: {nearest(self.qos, self.limits)}")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> "Cluster":
        """From the section `cluster` of a config.

        Raises:
            ValueError: naming the key, what it holds and what it may hold.
        """
        return checked(cls, section, where="cluster")

    @property
    def limit(self) -> Limit | None:
        """Of the quality of service that is asked for; None where it is not known."""
        return self.limits[self.qos or next(iter(self.limits))] if self.limits else None

    def variables(self) -> dict[str, str]:
        """The environment of every rank; what the user set stays."""
        offline = {} if self.internet else dict.fromkeys(OFFLINE, "1")
        return {name: os.environ.get(name, value) for name, value in {**offline, **self.environment}.items()}

    def inside(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """The command as srun starts it on a node, in the container if there is one.

        Singularity and Apptainer take variables over from the host, except those that the image itself sets; these
        are given once more with --env.
        """
        container = self.container
        if not container.used or container.runtime == "pyxis":
            return list(command)
        assert container.image is not None
        binds = [word for place in self.binds() for word in ("--bind", place)]
        given = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        return [container.runtime, "exec", *container.options, *binds, *given, container.image, *command]

    def srun_options(self) -> list[str]:
        """Of srun, for a container that it makes itself."""
        container = self.container
        if not container.used or container.runtime != "pyxis":
            return []
        mounts = (
            [f"--container-mounts={','.join(f'{place}:{place}' for place in self.binds())}"] if self.binds() else []
        )
        return [f"--container-image={container.image}", *mounts, "--no-container-mount-home", *container.options]

    def binds(self) -> list[str]:
        """Folders of this host that a container sees."""
        places = [os.path.expandvars(place) for place in self.container.binds]
        return [place for place in places if not place.startswith("$")]


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables with which Hugging Face's libraries read their cache alone."""


def duration(text: str) -> timedelta:
    """A time as Slurm writes it: MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Raises:
        ValueError: it is none of these. Minutes alone are refused: to YAML and to people 30:00 and 30 differ.
    """
    found = _TIME.fullmatch(text) or _DAYS.fullmatch(text)
    if found is None:
        raise ValueError(f"time={text!r}: expected HH:MM:SS or D-HH:MM:SS, such as 24:00:00")
    return timedelta(**{unit: int(number) for unit, number in found.groupdict().items() if number})
