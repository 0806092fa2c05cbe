"""Confinement of programs: namespaces with their own root, or what is available without them.

`enter` confines the supervisor. `Confinement.hold` confines a program's process after the fork, before its own code
runs.
"""

import contextlib
import itertools
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_ext.rl.sandbox.inside import kernel, syscalls

_NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_PROCESSES | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_NAMES
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FLAGS = {os.ST_NOSUID: kernel.NO_SETUID, os.ST_NODEV: kernel.NO_DEVICES, os.ST_NOEXEC: 8, os.ST_NOATIME: 1024}
_FLAGS |= {os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
# User IDs that are hardly ever in use; a process may take one without an account for it.
_FIRST_USER, _USERS = 1_200_000_000, 1_000_000


@dataclass(kw_only=True)
class Confinement:
    """Confinement that applies to programs.

    Attributes:
        namespaces: True if there are process, mount, network, IPC and host name namespaces, and a root that contains
            only the readable paths.
        directory: private directory of the programs.
        user: user and group ID that only the programs have; None if they run as the host's user.
        why_no_namespaces: reason why namespaces are not used; "" if they are.
        filter: system call filter for programs; empty if the machine's system calls are not known here.
        filter_installed: True if the supervisor has installed the filter, which programs then inherit at less cost.
        landlock: rules for reading and writing, used if there are no namespaces.
        counts_processes: True if the kernel limits the number of a program's processes.
        counted_besides: allowance for processes and threads of the same user that are not the program's own but count
            towards the kernel's limit.
        has_proc: True if /proc shows the programs' processes.
        signals_filtered: True if the filter lets a program signal only itself, because its user has other processes.
    """

    namespaces: bool
    directory: str
    user: int | None = None
    why_no_namespaces: str = ""
    filter: bytes = b""
    filter_installed: bool = False
    landlock: kernel.Landlock | None = None
    counts_processes: bool = True
    counted_besides: int = 0
    has_proc: bool = True
    signals_filtered: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the fields of the host's `Isolation` object."""
        return {
            "namespaces": self.namespaces,
            "own_user": self.user is not None,
            "system_call_filter": bool(self.filter),
            "landlock": self.landlock is not None,
            "why_no_namespaces": self.why_no_namespaces,
            "network": "namespace" if self.namespaces else "filter" if self.filter else "open",
            "counts_processes": self.counts_processes,
        }

    def empty_directory(self) -> None:
        """Remove all files that a program left, and restore the permissions of its directory."""
        os.chmod(self.directory, 0o1777 if self.namespaces else 0o700)
        without_attributes(self.directory)
        empty(self.directory)
        os.utime(self.directory, (0, 0))

    def hold(self, limits: Mapping[str, Any], *, compiler: bool) -> None:
        """Irrevocably confine this process, and everything it starts, to the limits.

        Args:
            compiler: True for the C++ compiler, which may start processes.
        """
        os.setsid()
        megabyte = 1 << 20
        seconds = max(1, -(-int(limits["cpu_seconds"] * 1000) // 1000))
        bounds = {
            resource.RLIMIT_CPU: (seconds, seconds + 1),
            resource.RLIMIT_AS: 2 * limits["memory_megabytes"] * megabyte,
            resource.RLIMIT_FSIZE: limits["disk_megabytes"] * megabyte,
            resource.RLIMIT_STACK: min(256, limits["memory_megabytes"]) * megabyte,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_RTPRIO: 0,
            resource.RLIMIT_NICE: 0,
        }
        if self.counts_processes:
            bounds[resource.RLIMIT_NPROC] = limits["processes"] + (0 if self.user else self.counted_besides)
        for which, bound in bounds.items():
            soft, hard = bound if isinstance(bound, tuple) else (bound, bound)
            most = resource.getrlimit(which)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(which, (soft, hard))
        if self.user is not None:
            become(self.user)
        kernel.drop_capabilities()
        kernel.no_new_privileges()
        # Unlike the supervisor, the program may be inspected by its user, or it could not open /dev/stdin.
        kernel.readable_by_its_user(True)
        if self.landlock is not None:
            self.landlock.enter()
        if self.filter and not self.filter_installed:
            only = os.getpid() if self.signals_filtered else None
            processes = compiler or self.counts_processes
            kernel.refuse_calls(syscalls.refusals(os.uname().machine, signals_only_to=only, processes=processes))


def enter(
    directory: str, *, namespaces: bool, readable: Sequence[str], disk_megabytes: int, why_not: str = ""
) -> Confinement:
    """Move this single-threaded process into namespaces, or prepare the confinement available without them.

    With namespaces, this returns in a child that is process 1 of the new namespace; the parent waits for it and exits.

    Args:
        directory: private directory for programs that run without namespaces.
        namespaces: whether to use namespaces.
        readable: files and folders that programs may read.
        disk_megabytes: size of the private directory if it is a separate file system.
        why_not: value of `Confinement.why_no_namespaces`.

    Raises:
        OSError: namespaces are requested but not available, or a program could signal other processes of its user.
    """
    user = _own_user()
    if namespaces:
        in_user_namespace = _enter_namespaces()
        _become_first_process()
        # If readable paths lie below /tmp (a virtual environment, say), programs get another folder.
        shared = any(path == "/tmp" or path.startswith("/tmp/") for path in readable)
        private = "/box" if shared else "/tmp"
        has_proc = _new_root(readable, private, disk_megabytes)
        confinement = Confinement(
            namespaces=True,
            directory=private,
            user=None if in_user_namespace else user,
            has_proc=has_proc,
            # The kernel does not count the real root's processes.
            counts_processes=_real_user() != 0 or not in_user_namespace,
            # The supervisor and its parent; before 5.14 all of the user's processes counted, in any namespace.
            counted_besides=2 if _kernel() >= (5, 14) else _users_threads() + 64,
        )
    else:
        confinement = _without_namespaces(directory, user, readable, why_not)
    kernel.readable_by_its_user(False)
    machine = os.uname().machine
    if machine in syscalls.MACHINES:
        confinement.filter = syscalls.refusals(machine)
        # Landlock restricts signals only from Linux 6.12 on; where programs share the host's user, the filter does too.
        confinement.signals_filtered = not (confinement.namespaces or confinement.user)
        if confinement.counts_processes and not confinement.signals_filtered:
            kernel.no_new_privileges()
            kernel.refuse_calls(confinement.filter)
            confinement.filter_installed = True
    limited = confinement.landlock is not None and confinement.landlock.signals
    if not (confinement.namespaces or confinement.user or confinement.filter or limited):
        raise OSError(
            "nothing stops a program from killing this user's other processes: no namespaces, no separate user to run "
            "it as, no Landlock (Linux 6.12 or later), and no system call filter for this machine; allow user "
            "namespaces, or run as root"
        )
    return confinement


def _own_user() -> int | None:
    """Return a user ID for this process's programs, derived from the process ID and thus unique on this machine."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as map:
        inside, _, count = (int(word) for word in map.readline().split())
    first, many = (_FIRST_USER, _USERS) if inside + count > _FIRST_USER + _USERS else (inside + 10_000, count - 20_000)
    if many < 10_000:
        return None
    # Containers may share users while each numbers its processes from 1.
    return first + (os.getpid() + 7919 * os.stat("/proc/self/ns/pid").st_ino) % many


def _real_user() -> int:
    """Return this process's user ID outside any user namespace that it may have created."""
    with open("/proc/self/uid_map") as map:
        _, outside, count = (int(word) for word in map.readline().split())
    return outside if count == 1 else os.geteuid()


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor[:3])) or 0)


def _users_threads() -> int:
    """Count the threads of all of this user's processes, which RLIMIT_NPROC limits."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _enter_namespaces() -> bool:
    """Enter new namespaces; return whether this required a user namespace, as it always does for users except root."""
    if os.geteuid() == 0:
        try:
            kernel.unshare(_NAMESPACES)
            return False
        except OSError:
            pass
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_NAMESPACES | kernel.NEW_USERS)
    for file, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    return True


def _become_first_process() -> None:
    child = os.fork()
    if child:
        # Only the child is in the new namespace; this process must close the host's connection.
        os.closerange(0, 256)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent()


def _new_root(readable: Sequence[str], private: str, disk_megabytes: int) -> bool:
    """Set up a new root with the readable paths, a few devices, /proc and the empty folder `private`.

    Return False if /proc cannot be mounted. `disk_megabytes` is the size of the file system in `private`.
    """
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, "size=1m,mode=755")
    os.mkdir("/tmp/.old")
    kernel.pivot_root("/tmp", "/tmp/.old")
    os.chdir("/")
    for path in sorted(set(readable)):
        _bind_readable(path)
    for folder in ("/dev", private, "/proc"):
        os.makedirs(folder, exist_ok=True)
    for device in _DEVICES:
        os.close(os.open(f"/dev/{device}", os.O_CREAT | os.O_WRONLY))
        kernel.mount(f"/.old/dev/{device}", f"/dev/{device}", flags=kernel.BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    has_proc = True
    try:
        kernel.mount("proc", "/proc", "proc", kernel.NO_SETUID | kernel.NO_DEVICES | 8)
    except OSError:
        # The kernel refuses this in containers that hide parts of /proc.
        has_proc = False
    options = f"size={disk_megabytes}m,nr_inodes=4096,mode=1777"
    kernel.mount("tmpfs", private, "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, options)
    kernel.unmount("/.old")
    os.rmdir("/.old")
    kernel.mount("none", "/", flags=kernel.REMOUNT | kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES)
    os.chdir(private)
    return has_proc


def _bind_readable(path: str) -> None:
    old = f"/.old{path}"
    if not os.path.lexists(old) or os.path.lexists(path):
        # Missing on this machine, or within a folder that is mounted already.
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    kernel.mount(old, path, flags=kernel.BIND | kernel.RECURSIVE)
    # A user namespace may not clear flags that the mount had before.
    flags_before = os.statvfs(path).f_flag
    kept_flags = sum(flag for bit, flag in _FLAGS.items() if flags_before & bit)
    flags = kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES
    kernel.mount("none", path, flags=flags | kept_flags)


def _without_namespaces(directory: str, user: int | None, readable: Sequence[str], why: str) -> Confinement:
    kernel.adopt_orphans()
    if user is not None and not _may_use(user, readable):
        user = None
    if user is not None:
        os.chown(directory, user, user)
    try:
        landlock = kernel.Landlock([*readable, "/dev/zero", "/dev/urandom", "/dev/random"], [directory, "/dev/null"])
    except OSError:
        landlock = None
    os.chdir(directory)
    return Confinement(
        namespaces=False,
        directory=directory,
        user=user,
        why_no_namespaces=why,
        landlock=landlock,
        counts_processes=os.geteuid() != 0 or user is not None,
        counted_besides=0 if user else _users_threads() + 64,
    )


def _may_use(user: int, readable: Sequence[str]) -> bool:
    """Return whether this process may switch to the user ID `user` and can then still access the readable paths."""
    child = os.fork()
    if not child:
        try:
            become(user)
            for path in readable:
                with contextlib.suppress(FileNotFoundError):
                    os.stat(path)
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def become(user: int) -> None:
    """Switch to a user ID, with the same number as the only group ID."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def without_attributes(file: str | int) -> None:
    """Remove a file's or directory's extended attributes, if it has any."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(file):
            os.removexattr(file, name)


def empty(directory: str) -> None:
    """Remove a directory's contents at any depth and with any permissions; links are not followed."""
    if not os.listdir(directory):
        return
    # Names that no entry has.
    fresh, secret = itertools.count(), os.urandom(8).hex()
    while True:
        folders = []
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
        if not folders:
            return
        for folder in folders:
            os.chmod(folder, 0o700)
            # Subfolders move up, so that no path gets too long.
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, f"{directory}/{secret}.{next(fresh)}")
                else:
                    os.unlink(entry.path)
            os.rmdir(folder)
