"""Interrupts that land where Python only reports exceptions."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_ext.job.interrupts import kept_interrupts


class Thing:
    """What a weak reference may point to."""


def in_callback(number: int) -> None:
    """An interrupt in a callback of a weak reference."""
    thing = Thing()
    kept = weakref.ref(thing, lambda _: signal.raise_signal(number))
    del thing
    assert kept() is None


def in_del(number: int) -> None:
    """An interrupt in `__del__`."""

    class Ends:
        def __del__(self) -> None:
            signal.raise_signal(number)

    Ends()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """SIGTERM interrupts too, as in jobs that serve; handlers are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("place", [in_callback, in_del])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lost_interrupt_comes_again(place: Callable[[int], None], number: int) -> None:
    began, survived = time.monotonic(), False
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        place(number)
        survived = True  # it was lost there
        time.sleep(20)

    assert survived
    assert time.monotonic() - began < 10


def test_until_it_gets_through() -> None:
    lost = 0
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        in_callback(signal.SIGINT)
        for lost in range(1, 4):  # all that this process does is such callbacks
            thing = Thing()
            kept = weakref.ref(thing, lambda _: time.sleep(0.2))
            del thing
            assert kept() is None
        time.sleep(20)

    assert lost == 3


def test_sigterm_comes_again_where_a_shell_had_sigint_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        in_del(signal.SIGTERM)
        time.sleep(20)


def test_one_that_was_not_lost_comes_once() -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    with kept_interrupts():
        in_callback(signal.SIGINT)
        time.sleep(0.2)

    assert came == [signal.SIGINT]


def test_nothing_comes_after_the_end() -> None:
    with kept_interrupts():
        in_del(signal.SIGINT)
    time.sleep(0.2)


def test_asyncio_cancels_its_task() -> None:
    ended = []

    async def work() -> None:
        try:
            in_del(signal.SIGTERM)
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        asyncio.run(work())

    assert ended == ["cancelled"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: seen.append(lost.exc_type))

    class Fails:
        def __del__(self) -> None:
            raise LookupError

    hook = sys.unraisablehook
    with kept_interrupts():
        Fails()

    assert seen == [LookupError]
    assert sys.unraisablehook is hook


LOSES = """
import os, signal, sys, time
def lose(place):
    os.register_at_fork(**{place: lambda: signal.raise_signal(signal.SIGINT)})
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    print("lost", file=sys.stderr)
    time.sleep(20)
"""
JOB = LOSES + """
from nemo_ext.job.config import run_job
sys.argv = ["x", "output=o"]
run_job("curriculum", lambda config: lose("after_in_parent"))
"""
RANK = LOSES + """
from nemo_ext.blockwise.rank import main
sys.exit(main(sys.argv[1], "log", lambda path: lose("before")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "said"), [(JOB, "lost\ninterrupted\n"), (RANK, "lost\n")])
def test_jobs_and_ranks_end(program: str, said: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", program, str(tmp_path / "config.yaml")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})

    assert (ended.returncode, ended.stderr) == (130, said)
