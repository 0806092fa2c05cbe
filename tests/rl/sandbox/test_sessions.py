"""Sessions whose interpreters are closed, killed or absent."""

from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.sandbox.sessions import Sessions, error_of

LIMITS = Limits(wall_seconds=10)
FIRST, SECOND = "x = 40", "x += 1"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=LIMITS)
    yield made
    made.close()


def interpreters(sandbox: Sandbox) -> list[psutil.Process]:
    """Supervisors of the sandbox, one for each interpreter, after those that are ending have ended."""
    assert sandbox._nursery._process is not None
    return psutil.wait_procs(psutil.Process(sandbox._nursery._process.pid).children(), timeout=1)[1]


def test_a_session_continues_whatever_happens_to_its_interpreter(sandbox: Sandbox) -> None:
    sessions = Sessions(sandbox, most=1, idle_seconds=60)
    sessions.call("a", [], FIRST)
    sessions.call("b", [], "y = 1")  # evicts a
    assert len(interpreters(sandbox)) == 1
    sessions.call("a", [FIRST], SECOND)

    for process in interpreters(sandbox):
        process.kill()
    third = sessions.call("a", [FIRST, SECOND], "x + 1")

    assert (third.stdout, error_of(third)) == (b"42\n", "")
    assert sessions.call("a", [FIRST], "x").stdout == b"40\n", "an earlier state"
    sessions.end("a")
    assert not interpreters(sandbox)


def test_idle_interpreters_are_closed(sandbox: Sandbox) -> None:
    sessions = Sessions(sandbox, most=8, idle_seconds=1e-9)
    for name in "abc":
        sessions.call(name, [], FIRST)

    assert len(interpreters(sandbox)) == 1
    sessions.close()
    assert not interpreters(sandbox)


def test_a_call_that_cannot_be_repeated_is_an_error(sandbox: Sandbox) -> None:
    sandbox.limits = replace(LIMITS, wall_seconds=0.2)

    with pytest.raises(SandboxError, match=r"call 2 of 2, which finished before, now failed \(over its time limit"):
        Sessions(sandbox, most=1, idle_seconds=60).call("a", [FIRST, "while True: pass"], "x")
