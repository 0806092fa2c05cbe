"""Host side of a supervisor, which runs one answer's programs."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_ext.rl.sandbox.inside import wire
from nemo_ext.rl.sandbox.isolation import Isolation, SandboxError
from nemo_ext.rl.sandbox.limits import COMPILATION, Limits
from nemo_ext.rl.sandbox.prelude import preloaded, prelude

_PACKAGE = str(Path(__file__).parent)
_STARTING_SECONDS = 60.0
_GRACE_SECONDS = 60.0
"""Seconds that a supervisor may take beyond a program's own limits, for very busy machines."""

_SENT_AHEAD = 32 << 10
_SESSION_SECONDS = 1 << 20

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/nix/store"),
)
"""Paths that programs may read in addition to the interpreter; missing paths are skipped."""

CPP_OPTIONS = ("-O2", "-std=gnu++20", "-pipe")

Ending = Literal["exit", "signal", "time", "cpu", "memory", "output", "processes", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of a program's run.

    Attributes:
        ended: exit or signal, or the limit that was exceeded: time (wall clock), cpu, memory, output, processes, disk.
        status: exit status or signal number.
        stdout: standard output, up to the limit.
        stderr: beginning of standard error, for messages.
        value: a function's result, or `error` of a call, as JSON; the program writes it, so it is no more trustworthy
            than stdout.
        seconds: wall clock time in seconds.
        cpu_seconds: processor time in seconds.
    """

    ended: Ending
    status: int
    stdout: bytes
    stderr: bytes
    value: bytes
    seconds: float
    cpu_seconds: float

    @property
    def ok(self) -> bool:
        """True if the program exited with status 0."""
        return self.ended == "exit" and self.status == 0

    def __str__(self) -> str:
        match self.ended:
            case "exit":
                return f"exit status {self.status}"
            case "signal":
                return f"killed by signal {self.status}"
            case "time" | "cpu":
                return "over its time limit"
            case _:
                return f"over its {self.ended} limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings shared by the boxes of one sandbox.

    Attributes:
        python: path of an interpreter, 3.10 or later.
        packages: folders that Python programs can import from, in addition to the standard library.
        readable: files and folders that programs may read.
        compiler: path of the C++ compiler.
    """

    python: str
    packages: Sequence[str]
    readable: Sequence[str]
    compiler: str | None

    @classmethod
    def detect(cls, *, python: str | None = None, packages: Sequence[str] | None = None) -> "Settings":
        """Create settings with this interpreter, its site-packages, and g++ if it is installed."""
        if packages is None:
            packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] if python is None else []
        prefix = sys.base_prefix if python is None else str(Path(python).resolve().parents[1])
        compiler = shutil.which("g++")
        return cls(
            python=python or str(getattr(sys, "_base_executable", sys.executable)),
            packages=list(dict.fromkeys(packages)),
            readable=[*SYSTEM, prefix, *packages],
            compiler=compiler and os.path.realpath(compiler),
        )


class Nursery:
    """Interpreter that forks supervisors, started on demand; thread-safe. It ends no later than this process."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._host: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def connect(self) -> socket.socket:
        """Connect to a new supervisor.

        Raises:
            SandboxError: the interpreter does not start.
        """
        ours, inside = socket.socketpair()
        with inside:
            try:
                with self._lock:
                    try:
                        socket.send_fds(self._connection(), [b"+"], [inside.fileno()])
                    except ConnectionError:
                        # The interpreter was killed from outside: retry with a new one.
                        self._stop()
                        socket.send_fds(self._connection(), [b"+"], [inside.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError(
                    f"sandbox: cannot start the interpreter {self._python} ({error}): check its path"
                ) from error
        return ours

    def close(self) -> None:
        """End the interpreter; supervisors that it has already forked continue."""
        with self._lock:
            self._stop()

    def _connection(self) -> socket.socket:
        if self._host is not None and self._owner != os.getpid():
            # This process is a fork of the nursery's owner.
            self._host.close()
            self._host = self._process = None
        if self._host is None:
            self._host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._owner = os.getpid()
            with inside:
                self._process = subprocess.Popen(
                    [self._python, "-s", "-S", "-X", "utf8", "-c", _START, _PACKAGE],
                    stdin=inside.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=_environment(),
                    start_new_session=True,
                )
        return self._host

    def _stop(self) -> None:
        if self._host is not None:
            self._host.close()
        if self._process is not None and self._owner == os.getpid():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
        self._host = self._process = None


class Box:
    """Host side of a supervisor, which runs one answer's programs. One thread uses it; any thread may call `kill`.

    Args:
        nursery: interpreter that forks the supervisor.
        namespaces: whether programs are confined by namespaces.
        why_not: reason why namespaces are not used, for `Isolation`.
        disk_megabytes: maximum size of the programs' private directory.

    Raises:
        SandboxError: the supervisor cannot start with the requested confinement.
    """

    def __init__(
        self,
        nursery: Nursery,
        settings: Settings,
        *,
        namespaces: bool,
        why_not: str = "",
        disk_megabytes: int = Limits().disk_megabytes,
    ) -> None:
        self._settings = settings
        self._supervisor: int | None = None
        self._outer = "" if namespaces else tempfile.mkdtemp(prefix="nemo_ext_sandbox_")
        self._host = nursery.connect()
        try:
            directory = os.path.join(self._outer, "tmp") if self._outer else ""
            if directory:
                os.mkdir(directory, 0o700)
                # Programs may pass through the outer folder but not list it, so its contents stay hidden from them.
                os.chmod(self._outer, 0o711)
            header = {
                "directory": directory,
                "disk_megabytes": disk_megabytes,
                "namespaces": namespaces,
                "packages": list(settings.packages),
                "readable": list(settings.readable),
                "why_not": why_not,
            }
            self._send(header, [], _STARTING_SECONDS)
            answer, _ = self._receive()
            if "failure" in answer:
                if namespaces:
                    raise SandboxError(answer["failure"])  # why there are no namespaces, for `describe`
                raise SandboxError(f"sandbox: programs cannot be confined without namespaces: {answer['failure']}")
            self.isolation = Isolation(**answer["isolation"])
            with suppress(OSError):
                self._supervisor = os.pidfd_open(answer["process"])
        except BaseException:
            self.close()
            raise

    def compile_python(self, source: str, limits: Limits, *, function: str | None = None) -> Run:
        """Compile a Python program, which `run` then runs; the compiler's messages are in `stderr`.

        Args:
            function: name of a function, or of a method of the class Solution, that each run calls; its input is the
                arguments as JSON, {"args": [...], "kwargs": {...}}.
        """
        names = prelude(source)
        header = {
            "operation": "compile_python",
            "function": function,
            "prelude": names,
            "preload": preloaded(f"{source}\n{names}"),
            "limits": asdict(limits),
        }
        return self._run(header, _encoded(source), limits)

    def compile_cpp(self, source: str, *, options: Sequence[str] = CPP_OPTIONS, limits: Limits = COMPILATION) -> Run:
        """Compile a C++ program, which `run` then runs; the compiler's messages are in `stderr`.

        Args:
            options: options of the compiler.

        Raises:
            SandboxError: g++ is not installed.
        """
        if self._settings.compiler is None:
            raise SandboxError("C++ programs require g++, which is not on PATH: install it (`apt-get install g++`)")
        header = {"operation": "compile_cpp", "compiler": [self._settings.compiler, *options]}
        return self._run({**header, "limits": asdict(limits)}, _encoded(source), limits)

    def run(self, stdin: bytes, limits: Limits) -> Run:
        """Run the compiled program, or call its function, with `stdin` as input."""
        return next(self.runs([stdin], [limits]))

    def runs(self, inputs: Sequence[bytes], limits: Sequence[Limits]) -> Generator[Run]:
        """Yield the result of `run` for each input; the next run starts while the caller handles the result.

        Closing the iterator early ends the box, since a program may still be running.
        """
        sent = taken = 0
        seconds = max(limit.wall_seconds for limit in limits) + _GRACE_SECONDS
        try:
            while taken < len(inputs):
                # Send one ahead if it fits into the socket's buffer: neither side may block in the middle of sending.
                while sent <= taken or (sent == taken + 1 < len(inputs) and len(inputs[sent]) < _SENT_AHEAD):
                    header = {"operation": "run", "limits": asdict(limits[sent])}
                    self._send(header, [inputs[sent]], seconds)
                    sent += 1
                taken += 1
                yield self._result()
        finally:
            if taken < sent:
                self.kill()

    def call(self, code: str, limits: Limits, *, fresh: bool = False) -> Run:
        """Execute code in the box's Python session, which the first call starts; variables and files persist.

        The result's `value` is {"error": traceback, or ""}, and `stdout` includes standard error and the value of the
        last expression, cut off at the limit. If the call exceeds a limit or ends the interpreter, `value` is empty,
        and the next call starts a new session. Processor time has no limit of its own.

        Args:
            fresh: whether to end the interpreter and all processes of earlier calls first; only files persist.
        """
        header = {"operation": "call", "fresh": fresh, "limits": {**asdict(limits), "cpu_seconds": _SESSION_SECONDS}}
        return self._run(header, _encoded(code), limits)

    def kill(self) -> None:
        """Immediately end the box and everything running in it; callers waiting for it get a SandboxError."""
        with suppress(OSError):
            self._host.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the supervisor, wait until it has exited, and remove its files."""
        self.kill()
        self._host.settimeout(_GRACE_SECONDS)
        try:
            # The supervisor sees the closed connection, ends the program, cleans up and closes its side.
            while self._host.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            if self._supervisor is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._supervisor, signal.SIGKILL)
        self._host.close()
        if self._supervisor is not None:
            os.close(self._supervisor)
            self._supervisor = None
        if self._outer:
            shutil.rmtree(self._outer, ignore_errors=True)

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, header: Mapping[str, Any], blob: bytes, limits: Limits) -> Run:
        self._send(header, [blob], limits.wall_seconds + _GRACE_SECONDS)
        return self._result()

    def _result(self) -> Run:
        answer, (stdout, stderr, value) = self._receive()
        return Run(**answer, stdout=stdout, stderr=stderr, value=value)

    def _send(self, header: Mapping[str, Any], blobs: Sequence[bytes], seconds: float) -> None:
        """Send a header and byte strings to the supervisor; `seconds` limits sending and each wait for a reply."""
        self._host.settimeout(seconds)
        with _sandbox_errors():
            wire.send(self._host, header, blobs)

    def _receive(self) -> wire.Message:
        with _sandbox_errors():
            answer = wire.receive(self._host)
        if answer is None:
            raise SandboxError(
                "sandbox: the program's supervisor exited without a reply; if memory is short, lower concurrency"
            )
        return answer


# The parent packages are stubs there, since their code is for the host.
_START = """
import sys, types
package = sys.argv[1]
sys.path.insert(0, package)
for name in ("nemo_ext", "nemo_ext.rl", "nemo_ext.rl.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["nemo_ext.rl.sandbox"].__path__ = [package]
from nemo_ext.rl.sandbox.inside.nursery import main
main()
"""


def _environment() -> dict[str, str]:
    """Return the interpreter's environment variables; only the library path is inherited."""
    # A fixed hash seed gives sets of strings the same order in every run.
    environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


def _encoded(source: str) -> bytes:
    return re.sub("[\ud800-\udfff]", "\ufffd", source).encode()


@contextmanager
def _sandbox_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise SandboxError(
            "sandbox: the program's supervisor did not reply in time; on a busy machine, lower concurrency"
        ) from None
    except OSError as error:
        raise SandboxError(
            f"sandbox: the program's supervisor exited ({error}); if memory is short, lower concurrency"
        ) from None
