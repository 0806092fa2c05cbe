"""Resource limits of a program."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from nemo_ext.job.settings import check_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run; a test is one run.

    Attributes:
        cpu_seconds: processor time of one process, which the kernel rounds up to whole seconds. 10 as in Domyn's code
            environment.
        wall_seconds: wall clock time of the run; more than `cpu_seconds`, since a busy machine is not the program's
            fault.
        memory_megabytes: resident memory of all its processes together, checked every 20 ms, less often where many
            processes run; the kernel limits the address space of each to twice that.
        processes: number of processes and threads together.
        output_bytes: size of stdout, and of a function's result. Of stderr 16 kB are kept.
        disk_megabytes: size of its private directory.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 20.0
    memory_megabytes: int = 1024
    processes: int = 32
    output_bytes: int = 4 << 20
    disk_megabytes: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.type in (int, "int")
            number = isinstance(value, int) or (isinstance(value, float) and not whole)
            if not number or isinstance(value, bool) or not 0 < value < 1 << 40:
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"limits.{field.name} must be {kind} above 0, not {value!r}")

    def changed(self, changes: Mapping[str, Any], where: str = "limits") -> "Limits":
        """Copy with the changes that a config or a task names.

        Raises:
            ValueError: naming the key, what it holds and what it may hold.
        """
        check_keys(changes, [field.name for field in fields(self)], required=[], where=where)
        try:
            return replace(self, **changes)
        except ValueError as error:
            raise ValueError(f"{where.removesuffix('limits')}{error}") from None

    def record(self) -> dict[str, Any]:
        """Limits as a JSON object."""
        return asdict(self)


COMPILATION = Limits(cpu_seconds=30, wall_seconds=60, memory_megabytes=2048, disk_megabytes=64)
"""Limits of g++ -O2, which takes a second or two for a contest program; templates can keep it busy forever."""
