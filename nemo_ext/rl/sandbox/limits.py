"""A program's resource limits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import checked

Number = Annotated[float, Field(gt=0, lt=1 << 40, allow_inf_nan=False)]
Whole = Annotated[int, Field(gt=0, lt=1 << 40)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run; a test is one run.

    Attributes:
        cpu_seconds: processor time of one process, which the kernel rounds up to whole seconds.
        wall_seconds: wall clock time of the run; more than `cpu_seconds`, since a busy machine is not the program's
            fault. Domyn's code environment has 10 (`domyn_multi_env_grpo`).
        memory_megabytes: resident memory of all its processes together, checked every 20 ms, less often where many
            processes run; the kernel limits the address space of each to twice that.
        processes: number of processes and threads together.
        output_bytes: size of stdout, and of a function's result. Only 16 kB of stderr are kept.
        disk_megabytes: size of its private directory.
    """

    cpu_seconds: Number = 10.0
    wall_seconds: Number = 20.0
    memory_megabytes: Whole = 1024
    processes: Whole = 32
    output_bytes: Whole = 4 << 20
    disk_megabytes: Whole = 64

    def changed(self, changes: Mapping[str, Any], where: str = "limits") -> "Limits":
        """Return a copy with the changes given in a config or task.

        Raises:
            ValueError: a change is invalid; the message names the key and the accepted values.
        """
        checked(Limits, changes, where, strict=True)
        return replace(self, **changes)


COMPILATION = Limits(cpu_seconds=30, wall_seconds=60, memory_megabytes=2048, disk_megabytes=64)
"""Limits for g++ -O2, which takes a second or two for a contest program but can be kept busy forever by templates."""
