"""Isolation of programs on this machine, and errors of the sandbox."""

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["auto", "namespaces", "processes"]
KINDS = get_args(Kind)


class SandboxError(RuntimeError):
    """Raised if the sandbox itself fails; programs never cause this error."""


class BusyError(SandboxError):
    """Raised if a request waited longer than `queue_seconds` for a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Isolation of a running program; rlimits, an empty environment and a private directory always apply.

    Attributes:
        namespaces: True if the program has its own process, mount, network, IPC and host name namespaces; its root has
            system folders, the interpreter, and nothing of a user's.
        own_user: True if nothing else runs under its user ID, so it can neither read this user's private files nor
            signal its processes.
        network: `namespace`, no network at all; `filter`, the kernel refuses sockets; or `open`, no restriction.
        system_call_filter: True with a seccomp filter; only x86_64 and aarch64 have one here.
        landlock: True if, without namespaces, Landlock confines it to system folders and its own directory, and to
            signalling its own processes.
        counts_processes: True if the kernel enforces the number of processes; otherwise the filter refuses a
            second process or, without a filter, processes are counted periodically.
        why_no_namespaces: the system's message, or that namespaces were not requested.
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
            "a separate user" if self.own_user else "this process's user",
            {"namespace": "no network", "filter": "no sockets", "open": "NETWORK OPEN"}[self.network],
            "system call filter" if self.system_call_filter else "no system call filter",
        ]
        if not self.namespaces:
            parts.append("Landlock" if self.landlock else "file permissions of its user only")
        return ", ".join([*parts, "rlimits"])
