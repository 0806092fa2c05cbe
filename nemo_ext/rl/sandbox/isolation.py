"""What keeps programs in, as it was found to work on this machine."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["auto", "namespaces", "processes"]
KINDS = ("auto", "namespaces", "processes")


class SandboxError(RuntimeError):
    """The sandbox itself failed; what a program does never raises it."""


class BusyError(SandboxError):
    """A request waited longer than it may for a place to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What holds while a program runs; rlimits, an empty environment and a private directory always do.

    Attributes:
        namespaces: its own processes, mounts, network, IPC and host name; its root has system folders, the
            interpreter, and nothing of a user's.
        own_user: its user number is no other's, so it can neither read this user's private files nor signal it.
        network: namespace (there is none), filter (the kernel refuses sockets), open.
        system_call_filter: seccomp; machines other than x86_64 and aarch64 have none here.
        landlock: without namespaces: it opens system folders and its own directory, and signals nobody else's.
        counts_processes: the kernel refuses one process too many; otherwise it refuses any second one, or, without
            a filter, they are counted now and then.
        why_no_namespaces: the system's words, or that they were not wanted.
    """

    namespaces: bool
    own_user: bool
    network: Literal["namespace", "filter", "open"]
    system_call_filter: bool
    landlock: bool
    counts_processes: bool
    why_no_namespaces: str = ""

    def __str__(self) -> str:
        parts = [
            "namespaces" if self.namespaces else f"no namespaces ({self.why_no_namespaces})",
            "a user of its own" if self.own_user else "this process's user",
            {"namespace": "no network", "filter": "no sockets", "open": "NETWORK OPEN"}[self.network],
            "system call filter" if self.system_call_filter else "no system call filter",
        ]
        if not self.namespaces:
            parts.append("Landlock" if self.landlock else "files as its user may read them")
        return ", ".join([*parts, "rlimits"])
