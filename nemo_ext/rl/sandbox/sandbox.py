"""Queue of untrusted programs, for threads and asyncio: at most `concurrency` run at a time while the rest wait.

sandbox = Sandbox()
print(sandbox.describe())
run = sandbox.run("print(int(input()) ** 2)", stdin="12")
run.ok, run.stdout          # True, b"144\\n"
"""

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Literal, TypeVar

from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked_whole, nearest
from nemo_ext.rl.sandbox.box import Box, Nursery, Run, Settings
from nemo_ext.rl.sandbox.isolation import KINDS, BusyError, Isolation, Kind, SandboxError
from nemo_ext.rl.sandbox.limits import Limits

T = TypeVar("T")
Language = Literal["python", "cpp"]


class Sandbox:
    """Sandbox for untrusted programs. It is thread-safe and can serve several event loops.

    Args:
        limits: limits of a run; if None, the defaults of `Limits`.
        concurrency: maximum number of boxes at a time; by default the number of processors.
        queue_seconds: maximum number of seconds that a request waits for a slot; unlimited if None.
        isolation: auto uses namespaces where available, namespaces requires them, processes never uses them.
        strict: same as `isolation="namespaces"`.
        python: interpreter for programs, with only the standard library; by default this one, with its packages.
        packages: folders that programs can import from.

    Raises:
        ValueError: an argument is invalid.
        SandboxError: namespaces are required and not available; the message says why.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        concurrency: int | None = None,
        queue_seconds: float | None = None,
        isolation: Kind = "auto",
        strict: bool = False,
        python: str | None = None,
        packages: Sequence[str] | None = None,
    ) -> None:
        if isolation not in KINDS:
            raise ValueError(f"isolation: unknown kind {isolation!r}: {nearest(str(isolation), KINDS)}")
        if strict and isolation == "processes":
            raise ValueError(
                "isolation=processes never uses namespaces, which strict=true requires: remove one of these settings"
            )
        if concurrency is not None:
            checked_whole("concurrency", concurrency, least=1)
        if queue_seconds is not None and not queue_seconds > 0:
            raise ValueError(f"queue_seconds must be a positive number or null, not {queue_seconds!r}")
        self.limits = limits or Limits()
        cores = len(os.sched_getaffinity(0))
        self.concurrency = concurrency or cores
        if self.concurrency > cores:
            notice(
                f"concurrency={self.concurrency} exceeds {cores} cores, and wall_seconds includes waiting for a core: "
                "raise wall_seconds if programs time out"
            )
        self._gate = _Gate(self.concurrency)
        self._queue_seconds = queue_seconds
        self._settings = Settings.detect(python=python, packages=packages)
        self._nursery = Nursery(self._settings.python)
        self._requested = isolation
        self._lock = threading.Lock()
        self._isolation: Isolation | None = None
        if strict or isolation == "namespaces":
            self._requested = "namespaces"
            self.describe()

    def describe(self) -> Isolation:
        """Return the isolation available on this machine, determined on the first call by running a test program.

        Raises:
            SandboxError: namespaces are required and not available, or no program can be run at all.
        """
        with self._lock:
            if self._isolation is None:
                self._isolation = self._probe()
            return self._isolation

    def _probe(self) -> Isolation:
        why_not = "not requested (isolation: processes)"
        if self._requested != "processes":
            try:
                return self._try(namespaces=True)
            except SandboxError as error:
                if self._requested == "namespaces":
                    raise SandboxError(
                        f"sandbox: namespaces are not available: {error}. Allow user namespaces (sysctl "
                        "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; in containers a "
                        "seccomp profile that allows unshare and mount), or run without, where the environment "
                        "allows it: strict=false, isolation=auto"
                    ) from error
                why_not = str(error)
        return self._try(namespaces=False, why_not=why_not)

    def _try(self, *, namespaces: bool, why_not: str = "") -> Isolation:
        with Box(self._nursery, self._settings, namespaces=namespaces, why_not=why_not) as box:
            box.compile_python("print(6 * 7)", self.limits)
            run = box.run(b"", self.limits)
            if run.stdout != b"42\n":
                raise SandboxError(
                    f"sandbox: no program can be run here: the test program failed ({run}, {run.stderr.decode()!r}); "
                    "raise the environment's limits if it exceeded one, or check the Python installation"
                )
            return box.isolation

    def session(self, work: Callable[[Box], T]) -> T:
        """Wait for a slot in this thread, then call `work` with a new box and return its result.

        Raises:
            BusyError: it waited longer than `queue_seconds`.
            SandboxError: the sandbox failed.
        """
        with self.slot(), self.open() as box:
            return work(box)

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Context manager that holds one of the `concurrency` slots, after waiting for it in this thread.

        Raises:
            BusyError: it waited longer than `queue_seconds`.
        """
        turn = self._gate.enter()
        with self._waiting(turn):
            turn.result(self._queue_seconds)
        try:
            yield
        finally:
            self._gate.leave()

    async def session_async(self, work: Callable[[Box], T]) -> T:
        """Asynchronous version of `session`; `work` runs in a thread. Cancelling ends it and its box immediately."""
        turn = self._gate.enter()
        with self._waiting(turn):
            await asyncio.wait_for(asyncio.wrap_future(turn), self._queue_seconds)
        done: Future[T] = Future()
        boxes: list[Box] = []
        cancelled = threading.Event()

        def run() -> None:
            failure: BaseException | None = SandboxError("sandbox: cancelled")
            try:
                if not cancelled.is_set():
                    with self.open() as box:
                        boxes.append(box)
                        if not cancelled.is_set():
                            result, failure = work(box), None
            except BaseException as error:
                failure = error
            # Before the result is set, so that whoever receives it finds the box closed and the slot free.
            self._gate.leave()
            with contextlib.suppress(InvalidStateError):
                # The event loop may have ended in the meantime and cancelled the future.
                if failure is None:
                    done.set_result(result)
                else:
                    done.set_exception(failure)

        # A daemon thread: the host does not wait for programs when it exits, and supervisors notice that it is gone.
        try:
            threading.Thread(target=run, name="sandbox", daemon=True).start()
        except RuntimeError as error:  # the process has too many threads
            self._gate.leave()
            raise SandboxError(
                f"sandbox: no thread can be started for a program ({error}): lower concurrency"
            ) from error
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        except asyncio.CancelledError:
            cancelled.set()
            for box in boxes:
                box.kill()
            raise

    def run(
        self, source: str, *, stdin: str | bytes = b"", language: Language = "python", limits: Limits | None = None
    ) -> Run:
        """Run a program once and return the result, or the compiler's result if it does not compile.

        Args:
            limits: limits of the run; the sandbox's if None.

        Raises:
            BusyError: it waited longer than `queue_seconds`.
            SandboxError: the sandbox failed.
        """
        return self.session(self._once(source, stdin, language, limits))

    async def run_async(
        self, source: str, *, stdin: str | bytes = b"", language: Language = "python", limits: Limits | None = None
    ) -> Run:
        """Asynchronous version of `run`."""
        return await self.session_async(self._once(source, stdin, language, limits))

    def close(self) -> None:
        """End the interpreter that starts supervisors. Running programs continue; the next request starts a new one."""
        self._nursery.close()

    def _once(self, source: str, stdin: str | bytes, language: Language, limits: Limits | None) -> Callable[[Box], Run]:
        encoded = stdin.encode() if isinstance(stdin, str) else stdin
        applied = limits or self.limits

        def work(box: Box) -> Run:
            compiled = box.compile_cpp(source) if language == "cpp" else box.compile_python(source, applied)
            return box.run(encoded, applied) if compiled.ok else compiled

        return work

    def open(self) -> Box:
        """Return a new box, to be closed by the caller; its programs run only in a `slot`."""
        isolation = self.describe()
        return Box(
            self._nursery,
            self._settings,
            namespaces=isolation.namespaces,
            why_not=isolation.why_no_namespaces,
            disk_megabytes=self.limits.disk_megabytes,
        )

    @contextlib.contextmanager
    def _waiting(self, turn: "Future[None]") -> Iterator[None]:
        """Context manager in which to wait for `turn`, a future from `_Gate.enter`; any error gives it up.

        Raises:
            BusyError: waiting timed out.
        """
        try:
            yield
        except BaseException as error:
            self._gate.give_up(turn)
            if not isinstance(error, TimeoutError):
                raise
            raise BusyError(
                f"sandbox: no slot was free within queue_seconds={self._queue_seconds:g}; {self._gate.waiting} more "
                f"requests are waiting: raise queue_seconds, or concurrency={self.concurrency}"
            ) from None


class _Gate:
    """First-come-first-served queue for threads and event loops alike."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._turns: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._turns)

    def enter(self) -> "Future[None]":
        """Request a slot; return a future that is done when one is free. Call `leave` after using it."""
        turn: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                self._turns.append(turn)
        return turn

    def leave(self) -> None:
        """Release a slot to the next request in line."""
        with self._lock:
            while self._turns:
                turn = self._turns.popleft()
                # False if the request has given up.
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1

    def give_up(self, turn: "Future[None]") -> None:
        """Stop waiting for `turn`, a future from `enter`; if it already has a slot, release that."""
        if not turn.cancel():
            self.leave()
