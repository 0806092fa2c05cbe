"""Worker processes that are killed at a time limit, for libraries that cannot be stopped in any other way.

A signal handler does not run while C code computes (a power of large integers, a regular expression), and only works in
the main thread, where engines do not call verifiers. Here a kernel timer kills the process, so the limit always holds.
Workers import their function once and serve many calls; a killed worker is replaced.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

START_LIMIT = 120.0
"""Maximum number of seconds that a worker may take to import its function."""
GRACE = 5.0
"""Seconds after the time limit until the host kills a worker whose own timer has not done so."""
MAX_CALLS = 2000
"""Number of calls after which a worker is replaced, since parsers' caches keep growing."""
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT", "TMPDIR")


class WorkerError(Exception):
    """Raised if a worker gave no result; the message says why."""


class TimeLimitError(WorkerError):
    """Raised if a worker gave no result in time."""


class _Worker:
    """A worker process and the connection to it, used by one call at a time."""

    def __init__(self, function: str, memory: int) -> None:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.connection, inside = Pipe()
        with inside:
            # A separate session: Ctrl-C at the terminal is handled by the host.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, function, str(memory), str(inside.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[inside.fileno()],
                env=environment,
                start_new_session=True,
            )
        self.calls = 0

    def receive(self, seconds: float) -> Any:
        """Read the next message within `seconds`; raise TimeLimitError, or EOFError or OSError if it exited."""
        if not self.connection.poll(seconds):
            raise TimeLimitError
        return json.loads(self.connection.recv_bytes())

    def send(self, message: Any) -> None:
        self.connection.send_bytes(json.dumps(message).encode())

    def kill(self) -> int:
        """Kill the process and return its exit status."""
        self.process.kill()
        self.connection.close()
        return self.process.wait()


class WorkerPool:
    """Pool of worker processes that call one function; thread-safe.

    From asyncio, use `asyncio.to_thread(pool.call, ...)`. Workers start on demand and end with the pool or with this
    process, even if it is killed. Forked children and unpickled copies have their own workers.

    Attributes:
        time_limit: maximum number of seconds per call, from the moment a worker receives it.
    """

    def __init__(self, function: str, time_limit: float, workers: int | None = None, memory: int = 4096) -> None:
        """Prepare the pool; no worker starts yet.

        Args:
            function: `module:name` of a function that takes and returns JSON values. If the module has a function
                `prepare`, for slow imports, each worker calls it once before it counts as started.
            time_limit: maximum number of seconds per call.
            workers: maximum number of processes; if None, one per core that this process may use, at most eight.
            memory: maximum address space of a worker process in MiB.

        Raises:
            ValueError: a number is not positive.
        """
        if workers is None:
            from nemo_ext.job.workers import usable_cores  # here, since workers import this module too

            workers = min(8, usable_cores())
        for name, value in {"time_limit": time_limit, "workers": workers, "memory": memory}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"worker pool: {name} must be a positive number, not {value!r}")
        self.time_limit = float(time_limit)
        self._function, self._workers, self._memory = function, int(workers), int(memory)
        self._reset()
        _POOLS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerPool, (self._function, self.time_limit, self._workers, self._memory)

    def call(self, *arguments: Any) -> Any:
        """Call the function with these arguments, after waiting for a free worker, however long that takes.

        Raises:
            TimeLimitError: the call took longer than the time limit.
            WorkerError: the function raised, or its process exited or did not start; the message says which.
        """
        with self._free:
            worker = self._borrow()
            try:
                answer = self._ask(worker, arguments)
            except BaseException:
                # Including Ctrl-C: the next call must not receive the pending result of this one.
                self._discard(worker)
                raise
            if worker.calls >= MAX_CALLS or self._closed:
                self._discard(worker)
            else:
                self._idle.append(worker)
        if "error" in answer:
            raise WorkerError(f"a call to {self._function} raised {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End all workers; later calls fail."""
        self._closed = True
        self._end()

    def _reset(self) -> None:
        self._closed = False
        self._free = threading.BoundedSemaphore(self._workers)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._end = weakref.finalize(self, _end, self._alive, os.getpid())

    def _forked(self) -> None:
        """In a forked child, forget the parent's workers and close the inherited ends of their connections."""
        self._end.detach()
        for worker in self._alive:
            worker.connection.close()
            worker.process.returncode = 0  # not this process's child to wait for
        self._reset()

    def _borrow(self) -> _Worker:
        while not self._closed:
            try:
                worker = self._idle.pop()
            except IndexError:
                return self._start()
            if worker.process.poll() is None:
                return worker
            self._discard(worker)  # it was killed while idle, by the out-of-memory killer for example
        raise WorkerError("the worker pool is closed: create another one")

    def _start(self) -> _Worker:
        try:
            worker = _Worker(self._function, self._memory)
        except OSError as error:
            raise WorkerError(f"cannot start a worker process ({error}): use fewer workers") from error
        self._alive.add(worker)
        try:
            ready = worker.receive(START_LIMIT)
        except TimeLimitError:
            self._discard(worker)
            raise WorkerError(
                f"a worker process did not start within {START_LIMIT:g} s; use fewer workers if the machine is "
                "overloaded"
            ) from None
        except (EOFError, OSError):
            status = self._discard(worker)
            raise WorkerError(
                f"a worker process exited with status {status} while starting: use fewer workers"
            ) from None
        except BaseException:
            self._discard(worker)
            raise
        if "error" in ready:
            self._discard(worker)
            raise WorkerError(
                f"a worker process cannot load {self._function} ({ready['error']}): check the installed packages"
            )
        return worker

    def _ask(self, worker: _Worker, arguments: Any) -> Any:
        try:
            worker.calls += 1
            worker.send([self.time_limit, arguments])
            return worker.receive(self.time_limit + GRACE)
        except TimeLimitError:
            raise TimeLimitError(
                f"a verification exceeded the time limit of {self.time_limit:g} s: raise time_limit if it needs more"
            ) from None
        except (EOFError, OSError):
            try:
                status = worker.process.wait(GRACE)
            except subprocess.TimeoutExpired:  # its pipe is closed, but it still runs
                status = worker.kill()
        if status in (-signal.SIGALRM, -signal.SIGXCPU):
            raise TimeLimitError(
                f"a verification exceeded the time limit of {self.time_limit:g} s: raise time_limit if it needs more"
            )
        raise WorkerError(f"a worker process exited with status {status} during a call: raise memory if it ran out")

    def _discard(self, worker: _Worker) -> int:
        self._alive.discard(worker)
        return worker.kill()


_POOLS: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


def _end(workers: set[_Worker], pid: int) -> None:
    if os.getpid() == pid:
        for worker in list(workers):
            worker.kill()
        workers.clear()


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool._forked()


os.register_at_fork(after_in_child=_after_fork)


def _serve(function: str, memory: int, connection: Connection) -> None:
    """Run a worker's main loop: import the function, report readiness, and answer calls until the parent is gone."""
    parent = os.getppid()

    def answer(message: Any) -> None:
        line = json.dumps(message).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(line)

    try:
        module, _, name = function.partition(":")
        loaded = importlib.import_module(module)
        called = getattr(loaded, name)
        if hasattr(loaded, "prepare"):
            loaded.prepare()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory << 20, memory << 20))
    except Exception as error:
        answer({"error": f"{function}: {type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    while True:
        # The connection may stay open in another child of a host that was killed.
        while not connection.poll(10):
            if os.getppid() != parent:
                return
        try:
            seconds, arguments = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        # The default action of SIGALRM kills the process, whatever it is doing.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer({"result": called(*arguments)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {str(error)[:200]}"})


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), Connection(int(sys.argv[3])))
