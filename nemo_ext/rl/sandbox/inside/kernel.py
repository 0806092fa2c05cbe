"""Linux system calls that Python does not wrap. Each raises an OSError that names the call."""

import ctypes
import fcntl
import os
import struct

# linux/sched.h
NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
# linux/mount.h
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2

_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_SECCOMP_FILTER = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446

OWN_DESCRIPTORS = 50
"""First file descriptor that the supervisor uses itself, above all those given to programs."""

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def move_up(descriptor: int) -> int:
    """Move a descriptor to a number that programs do not use."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OWN_DESCRIPTORS)
    os.close(descriptor)
    return moved


def unshare(flags: int) -> None:
    """Move this process into new namespaces, of the kinds given by the flags of unshare(2)."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, as mount(2) does."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    _checked(f"mount {target}", _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None))


def unmount(target: str) -> None:
    """Detach a mount immediately, even if it is in use."""
    _checked(f"umount {target}", _libc.umount2(target.encode(), DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root directory and move the previous root to `old`."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(f"pivot_root: unknown system call number on {machine}")
    _checked("pivot_root", _libc.syscall(ctypes.c_long(_PIVOT_ROOT[machine]), new.encode(), old.encode()))


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that created it ends."""
    _prctl("PR_SET_PDEATHSIG", _SET_DEATH_SIGNAL, 9)


def adopt_orphans() -> None:
    """Adopt descendants whose parent ends as children of this process."""
    _prctl("PR_SET_CHILD_SUBREAPER", _SET_SUBREAPER, 1)


def readable_by_its_user(yes: bool) -> None:
    """Allow or forbid processes of the same user to access this one's memory and files in /proc."""
    _prctl("PR_SET_DUMPABLE", _SET_DUMPABLE, int(yes))


def no_new_privileges() -> None:
    """Prevent set-uid programs from granting privileges from now on."""
    _prctl("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVILEGES, 1)


def drop_capabilities() -> None:
    """Drop all capabilities; none can be regained without a set-uid program."""
    header = struct.pack("Ii", 0x20080522, 0)
    _checked("capset", _libc.capset(header, bytes(24)))


def refuse_calls(instructions: bytes) -> None:
    """Install a seccomp filter, given as BPF instructions; call `no_new_privileges` first."""
    held = ctypes.create_string_buffer(instructions, len(instructions))
    # struct sock_fprog: the count, padding to a pointer's alignment, the pointer.
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held))
    _prctl("PR_SET_SECCOMP", _SET_SECCOMP, _SECCOMP_FILTER, ctypes.c_char_p(program))


def _prctl(name: str, option: int, *values: object) -> None:
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    arguments += [ctypes.c_ulong(0)] * (4 - len(arguments))
    _checked(name, _libc.prctl(ctypes.c_int(option), *arguments))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock ABI; 0 if it has none."""
    return max(0, int(_libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1))))


# linux/landlock.h: execute, read a file, read a folder; and all rights that an ABI knows.
_READ = 1 | 1 << 2 | 1 << 3
_FILE_RIGHTS = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}


class Landlock:
    """Landlock rule set, held as an open descriptor, which limits the files that a program may use.

    It also blocks TCP if the kernel has ABI 4 or later, and signals to processes outside if it has ABI 6 or later.

    Args:
        read: files and folders that the program may read and execute.
        write: files and folders that it may also change.

    Raises:
        OSError: the kernel does not support Landlock.
    """

    def __init__(self, read: list[str], write: list[str]) -> None:
        version = landlock_version()
        if not version:
            raise OSError("the kernel does not support Landlock (Linux 5.13 or later)")
        # From ABI 5 on also ioctl on devices.
        all_rights = (1 << _RIGHTS.get(version, 16)) - 1
        # From ABI 4 on TCP, from 6 on abstract sockets and signals.
        network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        attributes = struct.pack("QQQ", all_rights, network, scopes)[:size]
        rules = _checked(
            "landlock_create_ruleset",
            _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), attributes, ctypes.c_size_t(size), ctypes.c_uint(0)),
        )
        self.descriptor = move_up(rules)
        self.signals = version >= 6
        self._all_rights = all_rights
        for path in read:
            self._allow(path, _READ)
        for path in write:
            self._allow(path, all_rights)

    def _allow(self, path: str, rights: int) -> None:
        if not os.path.exists(path):
            return
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights &= self._all_rights if os.path.isdir(path) else self._all_rights & _FILE_RIGHTS
            rule = struct.pack("=Qi", rights, opened)
            call = ctypes.c_long(_LANDLOCK_ADD)
            _checked(
                f"landlock_add_rule {path}",
                _libc.syscall(call, ctypes.c_int(self.descriptor), ctypes.c_int(1), rule, ctypes.c_uint(0)),
            )
        finally:
            os.close(opened)

    def enter(self) -> None:
        """Apply the rules to this process and everything it starts; call `no_new_privileges` first."""
        call = ctypes.c_long(_LANDLOCK_RESTRICT)
        _checked("landlock_restrict_self", _libc.syscall(call, ctypes.c_int(self.descriptor), ctypes.c_uint(0)))
        os.close(self.descriptor)
