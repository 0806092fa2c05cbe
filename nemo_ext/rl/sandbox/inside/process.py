"""One run of a program: its process, limits and output."""

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
from nemo_ext.rl.sandbox.inside import kernel, processes, program
from nemo_ext.rl.sandbox.inside.confinement import Confinement

_WATCH_EVERY = 0.02
_STDERR_BYTES = 16_384


class HostGoneError(Exception):
    """Raised if the host is gone, so that nobody is waiting for results."""


@dataclass
class Ended:
    """Result of a run.

    Attributes:
        ended: exit, signal, time, cpu, memory, output, processes or disk.
        status: exit status or signal number.
        seconds: wall clock time in seconds.
        cpu_seconds: processor time of the program's process in seconds.
        outputs: mapping from file descriptors to their output, none longer than its limit.
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

    def prepare(self, stdin: bytes) -> None:
        """Fill standard input, and reset state that outlives the processes of the previous run."""
        if self.confinement.namespaces:
            # Reset process IDs, which would otherwise reveal the number of runs.
            with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as opened:
                opened.write("1")
        # Reset flags, locks, permissions, times and attributes of the open file, which all runs share.
        fcntl.fcntl(self.stdin, fcntl.F_SETFL, 0)
        fcntl.fcntl(self.stdin, fcntl.F_SETOWN, 0)
        fcntl.flock(self.stdin, fcntl.LOCK_UN)
        os.fchmod(self.stdin, 0o777)
        os.utime(self.stdin, (0, 0))
        confined.without_attributes(self.stdin)
        os.ftruncate(self.stdin, 0)
        os.lseek(self.stdin, 0, os.SEEK_SET)
        with open(self.stdin, "wb", closefd=False) as standard:
            standard.write(stdin)
        os.lseek(self.stdin, 0, os.SEEK_SET)


class Process:
    """Process that runs `job` within the limits.

    Args:
        place: resources shared with the other processes of the same answer.
        job: function that runs in the new process and does not return.
        limits: mapping from the names of limits, the fields of `Limits`, to their values.
        keep: descriptor that `job` needs in addition to its standard streams.
        compiler: True for the C++ compiler, which may start processes.
    """

    _cut = frozenset({2})
    """Descriptors whose excess output is dropped, since nothing compares it; elsewhere it ends the process."""

    def __init__(
        self,
        place: Place,
        job: Callable[[], NoReturn],
        limits: Mapping[str, Any],
        *,
        keep: int | None = None,
        compiler: bool = False,
    ) -> None:
        self._place, self._limits = place, limits
        pipes = {number: os.pipe() for number in (1, 2, program.VALUE)}
        self._child = os.fork()
        if not self._child:
            self._become(job, {number: written for number, (_, written) in pipes.items()}, keep, compiler)
        for _, written in pipes.values():
            os.close(written)
        self._handle = os.pidfd_open(self._child)
        self._readers = {read: number for number, (read, _) in pipes.items()}
        for reader in self._readers:
            os.set_blocking(reader, False)
        self._open = set(self._readers)
        self._read = {number: bytearray() for number in pipes}

    def until_ended(self, value_bytes: int = 0) -> Ended:
        """Wait until the process exits or exceeds a limit, and kill everything it started.

        Args:
            value_bytes: maximum size of a function's result.

        Raises:
            HostGoneError: the host is gone; the process has been killed.
        """
        self._most = {1: self._limits["output_bytes"], 2: _STDERR_BYTES, program.VALUE: value_bytes}
        began = time.monotonic()
        try:
            over = self._listen(began)
            seconds = time.monotonic() - began
        finally:
            cpu, code = self._end()
        return self._ended(over, seconds, cpu, code)

    def _ended(self, over: str, seconds: float, cpu: float, code: int) -> Ended:
        for reader in list(self._open):
            over = self._take(reader) or over
        for descriptor in (self._handle, *self._readers):
            os.close(descriptor)
        if not over and code < 0:
            killed = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= self._limits["cpu_seconds"])
            over = "cpu" if killed else "signal"
        elif not over and cpu > self._limits["cpu_seconds"]:
            over = "cpu"
        outputs = {number: bytes(held) for number, held in self._read.items()}
        return Ended(over or "exit", abs(code), seconds, cpu, outputs)

    def _end(self) -> tuple[float, int]:
        """Kill the process and everything it started; return processor seconds and exit code, negative for a signal."""
        # Not reaped yet, so the process ID is still valid even if it has exited.
        os.kill(self._child, signal.SIGKILL)
        _, status, used = os.wait4(self._child, 0)
        processes.end(self._place.confinement)
        return used.ru_utime + used.ru_stime, os.waitstatus_to_exitcode(status)

    def _listen(self, began: float) -> str:
        """Wait until the process exits or exceeds a limit; return the name of the limit, or "" if it exited.

        `began` is the value of `time.monotonic()` at which the wall clock time starts.
        """
        waiting = select.poll()
        for descriptor in (self._handle, *self._open):
            waiting.register(descriptor, select.POLLIN)
        # The host may have sent the next message already; here only a closed connection matters.
        waiting.register(self._place.host.fileno(), select.POLLRDHUP)
        deadline, watch_next = began + self._limits["wall_seconds"], began + _WATCH_EVERY
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            over = ""
            ready = {descriptor for descriptor, _ in waiting.poll(max(0.0, min(deadline, watch_next) - now) * 1000 + 1)}
            if self._place.host.fileno() in ready:
                raise HostGoneError
            for descriptor in ready & self._open:
                over = self._take(descriptor) or over
                if descriptor not in self._open:
                    waiting.unregister(descriptor)
            if over or self._handle in ready or self._answered():
                return over
            if time.monotonic() >= watch_next:
                over = self._over_limits()
                if over:
                    return over
                # The cost of the check grows with the machine's processes; keep it a small share of the time.
                watch_next = time.monotonic() + _WATCH_EVERY + 10 * (time.monotonic() - watch_next)

    def _answered(self) -> bool:
        """Return whether the process has finished its task without exiting."""
        return False

    def _take(self, reader: int) -> str:
        """Read the output available in the pipe `reader`; return "output" if it exceeds the limit, else ""."""
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
            if len(part) > room and number not in self._cut:
                return "output"

    def _over_limits(self) -> str:
        with contextlib.suppress(OSError):
            # The kernel's clock of the process (clock_getcpuclockid).
            if time.clock_gettime(~self._child << 3 | 2) > self._limits["cpu_seconds"]:
                return "cpu"
        used = processes.usage(self._place.confinement)
        if used.memory > self._limits["memory_megabytes"] << 20:
            return "memory"
        if used.processes > self._limits["processes"]:
            return "processes"
        # With namespaces, the directory is a separate file system with its own limit.
        separate, directory = self._place.confinement.namespaces, self._place.confinement.directory
        if not separate and processes.bytes_on_disk(directory, self._place.disk_bytes) > self._place.disk_bytes:
            return "disk"
        return ""

    def _become(
        self, job: Callable[[], NoReturn], outputs: Mapping[int, int], keep: int | None, compiler: bool
    ) -> NoReturn:
        try:
            # First move them away from the numbers that they are to get.
            moved = {number: fcntl.fcntl(end, fcntl.F_DUPFD, 100) for number, end in outputs.items()}
            for number, end in ({0: self._place.stdin} | moved).items():
                os.dup2(end, number)
            landlock = self._place.confinement.landlock
            needed = {keep, landlock.descriptor if landlock else None}
            least = max(outputs) + 1
            for descriptor in sorted(number for number in needed if number is not None):
                os.closerange(least, descriptor)
                least = descriptor + 1
            os.closerange(least, 1 << 16)
            self._place.confinement.hold(self._limits, compiler=compiler)
            job()
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"the program could not be started: {error!r}".encode())
            os._exit(125)
        finally:
            os._exit(125)


class Session(Process):
    """Process that executes one piece of code after another (`program.run_calls`) and is stopped in between."""

    _cut = frozenset({1, 2, program.VALUE})

    def __init__(self, place: Place, start: Callable[..., NoReturn], limits: Mapping[str, Any]) -> None:
        wake, self._wake = map(kernel.move_up, os.pipe())
        try:
            super().__init__(place, lambda: start(program.run_calls, wake), limits, keep=wake)
        finally:
            os.close(wake)

    def call(self, code: bytes, limits: Mapping[str, Any]) -> tuple[Ended, bool]:
        """Execute code; return the result, and whether the process is still running.

        The process is killed if it exceeds a limit. Nothing that it has started runs until the next call.

        Raises:
            HostGoneError: the host is gone; the process has been killed.
        """
        self._limits = limits
        self._most = dict.fromkeys(self._read, limits["output_bytes"])
        self._read = {number: bytearray() for number in self._read}
        self._place.prepare(code)
        processes.send(self._place.confinement, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has exited since the last call
            os.write(self._wake, b"+")
        began = time.monotonic()
        try:
            over = self._listen(began)
        except BaseException:
            self._end()
            raise
        seconds = time.monotonic() - began
        if not over and self._answered():
            processes.send(self._place.confinement, signal.SIGSTOP)
            for reader in list(self._open):
                self._take(reader)
            outputs = {number: bytes(held) for number, held in self._read.items()}
            return Ended("exit", 0, seconds, 0.0, outputs), True
        self._read[program.VALUE].clear()
        return self.end(over, seconds), False

    def end(self, over: str = "", seconds: float = 0.0) -> Ended:
        """Kill the process and everything it started, and return the result of its last call."""
        os.close(self._wake)
        return self._ended(over, seconds, *self._end())

    def _answered(self) -> bool:
        return self._read[program.VALUE].endswith(b"\n")
