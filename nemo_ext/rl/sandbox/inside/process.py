"""One process of a program, from its fork to its end: its limits and its output."""

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nemo_ext.rl.sandbox.inside import confinement as confined
from nemo_ext.rl.sandbox.inside import processes, program
from nemo_ext.rl.sandbox.inside.confinement import Confinement

_WATCH_EVERY = 0.02
_STDERR_BYTES = 16_384


class HostGoneError(Exception):
    """The host has gone: nobody waits for results any more."""


@dataclass
class Ended:
    """Result of a run.

    Attributes:
        ended: exit, signal, time, cpu, memory, output, processes or disk.
        status: exit status, or the signal's number.
        seconds: wall clock time.
        cpu_seconds: processor time of the program's process.
        outputs: output by descriptor, none longer than its limit.
    """

    ended: str
    status: int
    seconds: float
    cpu_seconds: float
    outputs: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Resources shared by all processes of one answer: host, confinement, standard input file, disk."""

    host: socket.socket
    confinement: Confinement
    stdin: int
    disk_bytes: int

    def forget(self) -> None:
        """Forget what the previous run can have left in things that outlive its processes."""
        if self.confinement.namespaces:
            # Process numbers begin anew, or they would count runs.
            with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as opened:
                opened.write("1")
        # Of the open file, which all share: flags, locks, permissions, times, attributes.
        fcntl.fcntl(self.stdin, fcntl.F_SETFL, 0)
        fcntl.fcntl(self.stdin, fcntl.F_SETOWN, 0)
        fcntl.flock(self.stdin, fcntl.LOCK_UN)
        os.fchmod(self.stdin, 0o777)
        os.utime(self.stdin, (0, 0))
        confined.without_attributes(self.stdin)

    def prepare(self, stdin: bytes) -> None:
        """Fill standard input; whatever the previous run did to the file is discarded."""
        os.ftruncate(self.stdin, 0)
        os.lseek(self.stdin, 0, os.SEEK_SET)
        with open(self.stdin, "wb", closefd=False) as standard:
            standard.write(stdin)
        os.lseek(self.stdin, 0, os.SEEK_SET)


class Process:
    """Process that runs `job` within the limits.

    Args:
        keep: descriptor that `job` needs besides its streams.
        compiler: True for our own compiler.
        reusable: True if `job` is `program.serve_python`, which runs once for each `again` and reports its end.
    """

    def __init__(
        self,
        place: Place,
        job: Callable[[], NoReturn],
        limits: Mapping[str, Any],
        *,
        keep: int | None = None,
        compiler: bool = False,
        reusable: bool = False,
    ) -> None:
        self._place = place
        self._talk: socket.socket | None = None
        pipes = {number: os.pipe() for number in (1, 2, program.VALUE)}
        given = {number: written for number, (_, written) in pipes.items()}
        theirs: socket.socket | None = None
        if reusable:
            self._talk, theirs = socket.socketpair()
            given[program.TALK] = theirs.fileno()
        self._child = os.fork()
        if not self._child:
            self._become(job, limits, given, keep, compiler, reusable)
        for _, written in pipes.values():
            os.close(written)
        if theirs is not None:
            theirs.close()
        self._handle = os.pidfd_open(self._child)
        self._readers = {read: number for number, (read, _) in pipes.items()}
        for reader in self._readers:
            os.set_blocking(reader, False)
        self._open = set(self._readers)
        self._read: dict[int, bytearray] = {}
        self._turn = self._heard = b""
        self._used = 0.0
        self.alive = True

    def again(self) -> None:
        """Let a reusable process run once more; if it has ended meanwhile, `until_ended` says so."""
        assert self._talk is not None
        # What earlier turns may still write there is not taken for the end of this one.
        self._turn, self._heard = os.urandom(program.TURN_BYTES), b""
        with contextlib.suppress(OSError):
            self._talk.sendall(self._turn)

    def until_ended(self, limits: Mapping[str, Any], value_bytes: int = 0) -> Ended:
        """Wait until it has ended, has run once, or is over a limit; `alive` says whether it can run again.

        Raises:
            HostGoneError: the host has gone; the process has been ended.
        """
        self._read = {number: bytearray() for number in self._readers.values()}
        self._most = {1: limits["output_bytes"], 2: _STDERR_BYTES, program.VALUE: value_bytes}
        began = time.monotonic()
        try:
            over, status = self._listen(limits, began)
        except BaseException:
            self.end()
            raise
        seconds = time.monotonic() - began
        if status is not None:
            cpu = self._cpu() - self._used
            self._used += cpu
            for reader in list(self._open):
                over = self._take(reader) or over
            return self._told(over, status, seconds, cpu, limits)
        total, code = self.end()
        for reader in list(self._open):
            over = self._take(reader) or over
        self._close()
        return self._told(over, code, seconds, total - self._used, limits)

    def end(self) -> tuple[float, int]:
        """Kill it and all that it started; returns its processor seconds and exit code, negative for a signal."""
        # Not waited for yet, so the number is still its own, whether it has ended or not.
        os.kill(self._child, signal.SIGKILL)
        _, status, used = os.wait4(self._child, 0)
        processes.end(self._place.confinement)
        self.alive = False
        return used.ru_utime + used.ru_stime, os.waitstatus_to_exitcode(status)

    def _listen(self, limits: Mapping[str, Any], began: float) -> tuple[str, int | None]:
        """Limit that was exceeded, if any, and the status if it has run and is still there."""
        waiting = select.poll()
        for descriptor in (self._handle, *self._open):
            waiting.register(descriptor, select.POLLIN)
        if self._talk is not None:
            waiting.register(self._talk.fileno(), select.POLLIN)
        # The host may have sent what comes next; only its end matters now.
        waiting.register(self._place.host.fileno(), select.POLLRDHUP)
        deadline, watch_next = began + limits["wall_seconds"], began + _WATCH_EVERY
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "time", None
            over, done = "", None
            ready = {descriptor for descriptor, _ in waiting.poll(max(0.0, min(deadline, watch_next) - now) * 1000 + 1)}
            if self._place.host.fileno() in ready:
                raise HostGoneError
            if self._talk is not None and self._talk.fileno() in ready:
                said = self._talk.recv(1 << 12)
                if not said:
                    waiting.unregister(self._talk.fileno())
                done = self._status(said)
            for descriptor in ready & self._open:
                over = self._take(descriptor) or over
                if descriptor not in self._open:
                    waiting.unregister(descriptor)
            if over:
                return over, None
            if done is not None:
                return "", done
            if self._handle in ready:
                return "", None
            if time.monotonic() >= watch_next:
                over = self._over_limits(limits)
                if over:
                    return over, None
                # What it costs grows with the machine's processes; it is to stay a small share.
                watch_next = time.monotonic() + _WATCH_EVERY + 10 * (time.monotonic() - watch_next)

    def _status(self, said: bytes) -> int | None:
        """Byte that follows this turn's mark, or None if it has not come."""
        self._heard += said
        _, mark, rest = self._heard.partition(self._turn)
        # A mark may come in parts; what is before it is nobody's.
        self._heard = mark + rest if mark else self._heard[-program.TURN_BYTES :]
        return rest[0] if rest else None

    def _take(self, reader: int) -> str:
        """Read the available output; returns "output" if it is over the limit."""
        number = self._readers[reader]
        while True:
            try:
                part = os.read(reader, 1 << 16)
            except BlockingIOError:
                return ""
            if not part:
                self._open.discard(reader)
                return ""
            held = self._read[number]
            room = self._most[number] - len(held)
            held += part[: max(0, room)]
            # Nobody compares stderr: what is too much is left out.
            if len(part) > room and number != 2:
                return "output"

    def _over_limits(self, limits: Mapping[str, Any]) -> str:
        with contextlib.suppress(OSError):
            if self._cpu() - self._used > limits["cpu_seconds"]:
                return "cpu"
        used = processes.usage(self._place.confinement)
        if used.memory > limits["memory_megabytes"] << 20:
            return "memory"
        if used.processes > limits["processes"]:
            return "processes"
        # A file system of its own has its own limit.
        own, directory = self._place.confinement.namespaces, self._place.confinement.directory
        if not own and processes.bytes_on_disk(directory, self._place.disk_bytes) > self._place.disk_bytes:
            return "disk"
        return ""

    def _cpu(self) -> float:
        """Processor seconds so far, from the kernel's clock of the process (clock_getcpuclockid)."""
        return time.clock_gettime(~self._child << 3 | 2)

    def _told(self, over: str, code: int, seconds: float, cpu: float, limits: Mapping[str, Any]) -> Ended:
        if not over and code < 0:
            killed = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= limits["cpu_seconds"])
            over = "cpu" if killed else "signal"
        elif not over and cpu > limits["cpu_seconds"]:
            over = "cpu"
        outputs = {number: bytes(held) for number, held in self._read.items()}
        return Ended(over or "exit", abs(code), seconds, cpu, outputs)

    def _close(self) -> None:
        for descriptor in (self._handle, *self._readers):
            os.close(descriptor)
        if self._talk is not None:
            self._talk.close()

    def _become(
        self,
        job: Callable[[], NoReturn],
        limits: Mapping[str, Any],
        outputs: Mapping[int, int],
        keep: int | None,
        compiler: bool,
        reusable: bool,
    ) -> NoReturn:
        try:
            # First out of the way of the numbers that they are to have.
            moved = {number: fcntl.fcntl(end, fcntl.F_DUPFD, 100) for number, end in outputs.items()}
            for number, end in ({0: self._place.stdin} | moved).items():
                os.dup2(end, number)
            landlock = self._place.confinement.landlock
            kept = {keep, landlock.descriptor if landlock else None, self._place.stdin if reusable else None}
            least = max(outputs) + 1
            for descriptor in sorted(number for number in kept if number is not None):
                os.closerange(least, descriptor)
                least = descriptor + 1
            os.closerange(least, 1 << 16)
            self._place.confinement.hold(limits, compiler=compiler, reusable=reusable)
            job()
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"the program could not be started: {error!r}".encode())
            os._exit(125)
        finally:
            os._exit(125)
