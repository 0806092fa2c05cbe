"""Python sessions, one per conversation: variables and files persist between calls.

A conversation stores only the code of its calls. A lost interpreter (killed, evicted, in another process) is
rebuilt by replaying the earlier calls.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from nemo_ext.rl.sandbox.box import Box, Run
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.sandbox import Sandbox

_PATIENCE = 3
"""Factor of the time limit when a call that finished earlier is executed again."""


class Sessions:
    """Sessions by name; thread-safe, but each session takes one call at a time. They end no later than this process.

    Args:
        sandbox: sandbox whose limits apply to each call.
        most: maximum number of idle interpreters; the least recently used one is closed first.
        idle_seconds: number of seconds after which the next call of any session closes an idle interpreter.
    """

    def __init__(self, sandbox: Sandbox, *, most: int, idle_seconds: float) -> None:
        self._sandbox, self._most, self._idle_seconds = sandbox, most, idle_seconds
        # Reentrant, because the garbage collector may end a session in a thread that holds it.
        self._lock = threading.RLock()
        self._idle: OrderedDict[str, tuple[Box, tuple[str, ...], float]] = OrderedDict()

    def call(self, name: str, before: Sequence[str], code: str, *, fresh: bool = False) -> Run:
        """Execute code in a session and return the result, as `Box.call` does.

        A call that exceeds a limit or ends the interpreter has no effect: the next one starts from the state before it.

        Args:
            before: code of the session's earlier calls, without calls that ended the interpreter.
            fresh: whether to end all processes of earlier calls first, so that only files persist.

        Raises:
            BusyError: it waited longer than the sandbox's `queue_seconds`.
            SandboxError: the sandbox failed, or an earlier call cannot be repeated.
        """
        with self._sandbox.slot():
            box = self._take(name, tuple(before))
            run = None
            if box is not None:
                try:
                    run = box.call(code, self._sandbox.limits, fresh=fresh)
                except SandboxError:  # the interpreter was killed from outside
                    box.close()
                    box = None
            if box is None:
                box = self._rebuilt(before)
            try:
                run = run or box.call(code, self._sandbox.limits, fresh=fresh)
            except BaseException:
                box.close()
                raise
        if error_of(run) is None:
            box.close()
        else:
            self._put(name, box, (*before, code))
        return run

    def end(self, name: str) -> None:
        """End a session; do nothing if it has no interpreter here."""
        with self._lock:
            found = self._idle.pop(name, None)
        if found is not None:
            found[0].close()

    def close(self) -> None:
        """End all sessions."""
        for name in list(self._idle):
            self.end(name)

    def _take(self, name: str, before: tuple[str, ...]) -> Box | None:
        """Remove a session's idle interpreter and return it; None if none has executed exactly the calls `before`."""
        with self._lock:
            found, closed, now = self._idle.pop(name, None), list[Box](), time.monotonic()
            while self._idle and now - next(iter(self._idle.values()))[2] > self._idle_seconds:
                closed.append(self._idle.popitem(last=False)[1][0])
        if found is not None and found[1] != before:
            closed.append(found[0])
            found = None
        for box in closed:
            box.close()
        return None if found is None else found[0]

    def _put(self, name: str, box: Box, calls: tuple[str, ...]) -> None:
        with self._lock:
            self._idle[name] = box, calls, time.monotonic()
            evicted = self._idle.popitem(last=False)[1][0] if len(self._idle) > self._most else None
        if evicted is not None:
            evicted.close()

    def _rebuilt(self, calls: Sequence[str]) -> Box:
        limits = self._sandbox.limits
        patient = replace(limits, wall_seconds=_PATIENCE * limits.wall_seconds)
        box = self._sandbox.open()
        try:
            for number, code in enumerate(calls, 1):
                run = box.call(code, patient)
                if error_of(run) is None:
                    raise SandboxError(
                        f"sandbox: the session cannot be restored: call {number} of {len(calls)}, which finished "
                        f"before, now failed ({run}); raise the environment's limits"
                    )
        except BaseException:
            box.close()
            raise
        return box


def error_of(run: Run) -> str | None:
    """Return the traceback of a call, "" if it raised nothing, or None if the interpreter has ended."""
    try:
        return str(json.loads(run.value.splitlines()[-1])["error"])
    except (ValueError, LookupError, TypeError):  # empty, or written by the program itself
        return None
