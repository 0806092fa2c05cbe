"""Supervisor of one answer's programs: receives them from the host, runs one at a time, and reports each result.

Each message from the host gets one reply; when the host closes the connection, everything here ends. Expected
outputs are never sent here, so a program cannot find them.
"""

import contextlib
import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nemo_ext.rl.sandbox.inside import confinement as confined
from nemo_ext.rl.sandbox.inside import kernel, processes, program, wire
from nemo_ext.rl.sandbox.inside.process import Ended, HostGoneError, Place, Process, Session

_SOURCE, _BINARY = "main.cpp", "main.out"
_CODE_BYTES = 64 << 20


class Supervisor:
    """Supervisor with one confinement and one compiled program at a time."""

    def __init__(
        self,
        host: socket.socket,
        confinement: confined.Confinement,
        *,
        stdin: int,
        disk_megabytes: int,
    ) -> None:
        self._host = host
        self._environment = {
            "HOME": confinement.directory,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "TMPDIR": confinement.directory,
        }
        self._place = Place(host, confinement, stdin, disk_megabytes << 20)
        self._code: bytes | None = None
        self._function: str | None = None
        self._executable: int | None = None
        self._session: Session | None = None

    def serve(self) -> None:
        """Answer messages until the host is gone."""
        operations = {
            "compile_python": self._compile_python,
            "compile_cpp": self._compile_cpp,
            "run": self._run,
            "call": self._call,
        }
        while (message := wire.receive(self._host)) is not None:
            header, blobs = message
            ended = operations[header["operation"]](header, blobs[0])
            outputs = [ended.outputs.get(number, b"") for number in (1, 2, program.VALUE)]
            fields = {name: getattr(ended, name) for name in ("ended", "status", "seconds", "cpu_seconds")}
            wire.send(self._host, fields, outputs)

    def _compile_python(self, header: dict[str, Any], source: bytes) -> Ended:
        for name in set(header["preload"]) - sys.modules.keys():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
            gc.freeze()
        self._executable = self._code = None
        self._function = header["function"]
        ended = self._once(
            lambda: self._python(program.compile_python, source, header["prelude"]),
            header["limits"],
            value_bytes=_CODE_BYTES,
        )
        if ended.ended == "exit" and ended.status == 0:
            self._code = ended.outputs.pop(program.VALUE)
        return ended

    def _compile_cpp(self, header: dict[str, Any], source: bytes) -> Ended:
        folder = self._place.confinement.directory
        self._place.confinement.empty_directory()
        with open(os.path.join(folder, _SOURCE), "wb") as opened:
            opened.write(source)
            os.fchmod(opened.fileno(), 0o644)
        command = [*header["compiler"], "-o", _BINARY, _SOURCE]
        path = f"{os.path.dirname(command[0])}:{self._environment['PATH']}"
        environment = {**self._environment, "PATH": path}
        ended = self._once(
            lambda: program.run_executable(command[0], command, environment), header["limits"], compiler=True
        )
        if ended.ended == "exit" and ended.status == 0:
            # Programs cannot find it: it stays open here, and its name is removed when the directory is emptied.
            self._executable = kernel.move_up(os.open(os.path.join(folder, _BINARY), os.O_RDONLY | os.O_NOFOLLOW))
        return ended

    def _run(self, header: dict[str, Any], stdin: bytes) -> Ended:
        limits, executable, code = header["limits"], self._executable, self._code
        # No run may leave anything for the next.
        self._place.confinement.empty_directory()
        self._place.prepare(stdin)
        if executable is not None:
            return self._once(
                lambda: program.run_executable(executable, ["main"], self._environment), limits, keep=executable
            )
        assert code is not None
        return self._once(
            lambda: self._python(program.run_python, code, self._function), limits, value_bytes=limits["output_bytes"]
        )

    def _call(self, header: dict[str, Any], code: bytes) -> Ended:
        if self._session is None:
            self._place.confinement.empty_directory()
        elif header["fresh"]:
            self._session.end()
            self._session = None
        if self._session is None:
            self._session = Session(self._place, self._python, header["limits"])
        ended, alive = self._session.call(code, header["limits"])
        if not alive:
            self._session = None
        return ended

    def _python(self, run: Callable[..., NoReturn], *given: Any) -> NoReturn:
        os.environ.clear()
        os.environ.update(self._environment)
        run(*given)

    def _once(self, job: Callable[[], NoReturn], limits: dict[str, Any], *, value_bytes: int = 0, **how: Any) -> Ended:
        return Process(self._place, job, limits, **how).until_ended(value_bytes)


def serve(host: socket.socket) -> None:
    """Supervise one answer's programs until the host is gone."""
    message = wire.receive(host)
    if message is None:
        return
    header, _ = message
    here = os.getpid()
    # Before the system call filter is installed, which refuses this to the supervisor too.
    stdin = kernel.move_up(os.memfd_create("stdin", os.MFD_CLOEXEC))
    try:
        confinement = confined.enter(
            header["directory"],
            namespaces=header["namespaces"],
            readable=header["readable"],
            disk_megabytes=header["disk_megabytes"],
            why_not=header["why_not"],
        )
    except OSError as error:
        wire.send(host, {"failure": str(error)})
        return
    # From here on, programs import only from the standard library and from the folders that the host names.
    sys.path += header["packages"]
    wire.send(host, {"process": here, "isolation": confinement.describe()})
    try:
        Supervisor(host, confinement, stdin=stdin, disk_megabytes=header["disk_megabytes"]).serve()
    except (HostGoneError, OSError):
        pass
    finally:
        processes.end(confinement)
        if not confinement.namespaces:
            os.chdir("/")
            confinement.empty_directory()
            # Remove the outer folder too, since a host that is gone cannot do it.
            with contextlib.suppress(OSError):
                os.rmdir(header["directory"])
                os.rmdir(os.path.dirname(header["directory"]))
