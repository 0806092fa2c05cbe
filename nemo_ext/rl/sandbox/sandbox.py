"""Many programs at once, from threads and from asyncio: a few run, the others wait, none is lost.

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

from nemo_ext.job.settings import checked_whole, nearest
from nemo_ext.rl.sandbox.box import Box, Nursery, Run, Settings
from nemo_ext.rl.sandbox.isolation import KINDS, BusyError, Isolation, Kind, SandboxError
from nemo_ext.rl.sandbox.limits import Limits

T = TypeVar("T")
Language = Literal["python", "cpp"]


class Sandbox:
    """Runs untrusted programs. Thread-safe; a sandbox may serve several event loops.

    Args:
        limits: limits of each run.
        concurrency: number of boxes at once; by default the number of processors.
        queue_seconds: time that a request may wait for its turn; None waits for as long as it takes.
        isolation: auto uses namespaces where available, namespaces requires them, processes does without.
        strict: same as requiring namespaces: raises, and runs nothing, if there are none.
        python: interpreter for programs, with the standard library only; by default this one, with its packages.
        packages: folders that programs import from.
        readable: more files and folders that programs may read.

    Raises:
        ValueError: an argument is not one of those.
        SandboxError: `strict` or `isolation="namespaces"` is set and there are no namespaces; says why.
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
        readable: Sequence[str] = (),
    ) -> None:
        if isolation not in KINDS:
            raise ValueError(f"isolation: unknown kind {isolation!r}: {nearest(str(isolation), KINDS)}")
        if strict and isolation == "processes":
            raise ValueError("isolation: strict insists on namespaces, and 'processes' does without them")
        if concurrency is not None:
            checked_whole("concurrency", concurrency, least=1)
        if queue_seconds is not None and not queue_seconds > 0:
            raise ValueError(f"queue_seconds must be a number above 0 or none, not {queue_seconds!r}")
        self.limits = limits or Limits()
        self.concurrency = concurrency or len(os.sched_getaffinity(0))
        self._gate = _Gate(self.concurrency)
        self._queue_seconds = queue_seconds
        self._settings = Settings.found(python=python, packages=packages, readable=readable)
        self._nursery = Nursery(self._settings.python)
        self._wanted = isolation
        self._lock = threading.Lock()
        self._found: Isolation | None = None
        if strict or isolation == "namespaces":
            self._wanted = "namespaces"
            self.describe()

    def describe(self) -> Isolation:
        """Isolation on this machine, found by trying, once.

        Raises:
            SandboxError: namespaces are required and not available, or nothing can be run at all.
        """
        with self._lock:
            if self._found is None:
                self._found = self._probe()
            return self._found

    def _probe(self) -> Isolation:
        why_not = "not wanted (isolation: processes)"
        if self._wanted != "processes":
            try:
                return self._probed(namespaces=True)
            except SandboxError as error:
                if self._wanted == "namespaces":
                    raise SandboxError(
                        f"sandbox: no namespaces: {error}. Allow user namespaces (sysctl user.max_user_namespaces, "
                        "kernel.apparmor_restrict_unprivileged_userns=0; in containers a seccomp profile that has "
                        "unshare and mount), or do without: strict=False, isolation: auto"
                    ) from error
                why_not = str(error)
        return self._probed(namespaces=False, why_not=why_not)

    def _probed(self, *, namespaces: bool, why_not: str = "") -> Isolation:
        with Box(self._nursery, self._settings, namespaces=namespaces, why_not=why_not) as box:
            box.compile_python("print(6 * 7)", self.limits)
            run = box.run(b"", self.limits)
            if run.stdout != b"42\n":
                raise SandboxError(f"sandbox: a first program does not run: {run}: {run.stderr.decode()!r}")
            return box.isolation

    def session(self, work: Callable[[Box], T]) -> T:
        """Call `work` with a box of its own when its turn has come and return its result; waits in this thread.

        Raises:
            BusyError: it waited longer than `queue_seconds`.
            SandboxError: the sandbox failed.
        """
        turn = self._gate.enter()
        with self._waiting(turn):
            turn.result(self._queue_seconds)
        try:
            with self._box() as box:
                return work(box)
        finally:
            self._gate.leave()

    async def session_async(self, work: Callable[[Box], T]) -> T:
        """`session` for asyncio: `work` runs in a thread. Cancelling ends it at once, together with its box."""
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
                    with self._box() as box:
                        boxes.append(box)
                        if not cancelled.is_set():
                            result, failure = work(box), None
            except BaseException as error:
                failure = error
            # Told last: who has a result finds nothing of it left, and its place free.
            self._gate.leave()
            with contextlib.suppress(InvalidStateError):
                # The event loop may have ended meanwhile and cancelled it.
                if failure is None:
                    done.set_result(result)
                else:
                    done.set_exception(failure)

        # A daemon thread: a host that ends does not wait for programs, and their supervisors see that it is gone.
        threading.Thread(target=run, name="sandbox", daemon=True).start()
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
        """Run one program once; if it does not compile, returns the compiler's run.

        Raises:
            BusyError: it waited longer than `queue_seconds`.
            SandboxError: the sandbox failed.
        """
        return self.session(self._once(source, stdin, language, limits))

    async def run_async(
        self, source: str, *, stdin: str | bytes = b"", language: Language = "python", limits: Limits | None = None
    ) -> Run:
        """`run` for asyncio."""
        return await self.session_async(self._once(source, stdin, language, limits))

    def close(self) -> None:
        """End the interpreter that starts supervisors. Running programs go on; a later one starts it anew."""
        self._nursery.close()

    def _once(self, source: str, stdin: str | bytes, language: Language, limits: Limits | None) -> Callable[[Box], Run]:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        held = limits or self.limits

        def work(box: Box) -> Run:
            compiled = box.compile_cpp(source) if language == "cpp" else box.compile_python(source, held)
            return box.run(given, held) if compiled.ok else compiled

        return work

    def _box(self) -> Box:
        found = self.describe()
        return Box(
            self._nursery,
            self._settings,
            namespaces=found.namespaces,
            why_not=found.why_no_namespaces,
            disk_megabytes=self.limits.disk_megabytes,
        )

    @contextlib.contextmanager
    def _waiting(self, turn: "Future[None]") -> Iterator[None]:
        """Give the turn up if it does not come."""
        try:
            yield
        except BaseException as error:
            self._gate.give_up(turn)
            if not isinstance(error, TimeoutError):
                raise
            raise BusyError(
                f"sandbox: no place to run within queue_seconds ({self._queue_seconds:g}); "
                f"{self._gate.waiting} wait, {self.concurrency} run at once"
            ) from None


class _Gate:
    """First-come-first-served queue for threads and event loops alike."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._turns: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._turns)

    def enter(self) -> "Future[None]":
        """Future that is done when there is a place; call `leave` afterwards."""
        turn: Future[None] = Future()
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                self._turns.append(turn)
        return turn

    def leave(self) -> None:
        """Give the place to the next in line."""
        with self._lock:
            while self._turns:
                turn = self._turns.popleft()
                # False if its request has given up.
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1

    def give_up(self, turn: "Future[None]") -> None:
        """Stop waiting; a place that was given meanwhile goes to the next in line."""
        if not turn.cancel():
            self.leave()
