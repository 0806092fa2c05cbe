"""Interrupts that land where Python only reports exceptions."""

import asyncio
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from nemo_ext.job import interrupts
from nemo_ext.job.interrupts import interrupts_between, kept_interrupts

interrupt, terminate = partial(signal.raise_signal, signal.SIGINT), partial(signal.raise_signal, signal.SIGTERM)


class Thing:
    """A target for weak references."""


def in_callback(do: Callable[[], object]) -> None:
    """Do something in a callback of a weak reference."""
    thing = Thing()
    kept = weakref.ref(thing, lambda _: do())
    del thing
    assert kept() is None


def in_del(do: Callable[[], object]) -> None:
    """Do something in `__del__`."""

    class Ends:
        def __del__(self) -> None:
            do()

    Ends()


def wait() -> None:
    """Longer than the time until a lost interrupt is repeated."""
    time.sleep(5)


def until_interrupted(*steps: Callable[[], object]) -> int:
    """Number of steps that ended before an interrupt."""
    ended = 0
    with suppress(KeyboardInterrupt), kept_interrupts():
        for step in steps:
            step()
            ended += 1
    return ended


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """SIGTERM interrupts too, as in serving jobs; handlers are restored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("place", [in_callback, in_del])
@pytest.mark.parametrize("do", [interrupt, terminate], ids=["SIGINT", "SIGTERM"])
def test_a_lost_interrupt_is_repeated(place: Callable[[object], None], do: Callable[[], object]) -> None:
    assert until_interrupted(partial(place, do), wait, wait) == 1


def test_an_interrupt_lost_twice_is_repeated_twice() -> None:
    lost_again = partial(in_callback, wait)

    assert until_interrupted(partial(in_del, interrupt), lost_again, lost_again, wait) == 3


def test_sigterm_is_repeated_where_sigint_is_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    assert until_interrupted(partial(in_del, terminate), wait) == 1


def test_an_interrupt_that_arrived_is_not_repeated() -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))

    assert until_interrupted(partial(in_callback, interrupt), partial(time.sleep, 0.2)) == 2
    assert came == [signal.SIGINT]


def test_no_interrupt_comes_after_the_end() -> None:
    assert until_interrupted(partial(in_del, interrupt)) == 1
    time.sleep(0.2)


def test_asyncio_cancels_its_task() -> None:
    ended = []

    async def work() -> None:
        try:
            in_del(terminate)
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    assert until_interrupted(lambda: asyncio.run(work()), wait) == 0
    assert ended == ["cancelled"]


def test_other_exceptions_are_reported_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        seen.append(lost.exc_type)

    def fail() -> None:
        raise LookupError

    monkeypatch.setattr(sys, "unraisablehook", hook)

    assert until_interrupted(partial(in_del, fail)) == 1
    assert seen == [LookupError]
    assert sys.unraisablehook is hook


def test_an_interrupt_waits_for_an_allowed_point() -> None:
    done = []
    with suppress(KeyboardInterrupt), interrupts_between() as let_through:
        let_through()
        interrupt()
        done.append("the middle of something")
        let_through()
        done.append("the next")
    assert done == ["the middle of something"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("do", [interrupt, terminate], ids=["SIGINT", "SIGTERM"])
def test_the_first_interrupt_waits_for_the_end_and_the_second_does_not(
    do: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "SECONDS_OF_ONE", 60)
    done = []
    with suppress(KeyboardInterrupt):
        with interrupts_between():
            do()
            do()  # so soon after the first, it counts as the same interrupt
            monkeypatch.setattr(interrupts, "SECONDS_OF_ONE", -1)
            with pytest.raises(KeyboardInterrupt):
                do()
            done.append("all")
        done.append("the rest")
    assert done == ["all"]


def test_after_one_arrived_the_next_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "SECONDS_OF_ONE", -1)
    done = []
    with suppress(KeyboardInterrupt), interrupts_between() as let_through:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()
        done.append("clearing up")
        interrupt()
        done.append("more of it")
    assert done == ["clearing up"]


def test_no_interrupt_is_held_where_ignored_or_in_another_thread() -> None:
    def handler() -> object:
        with interrupts_between() as let_through:
            let_through()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(handler).result() is signal.default_int_handler
    assert handler() is not signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert handler() is signal.SIG_IGN


LOSES = """
import os, signal, sys, time
def lose(place):
    os.register_at_fork(**{place: lambda: signal.raise_signal(signal.SIGINT)})
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    print("lost", file=sys.stderr)
    time.sleep(5)
"""
JOB = """
from nemo_ext.job.config import run_job
sys.argv = ["x", "output=o"]
run_job("curriculum", lambda config: lose("after_in_parent"))
"""
RANK = """
from nemo_ext.job.rank import main
sys.exit(main(sys.argv[1], "log", lambda path: lose("before")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "said"), [(JOB, "lost\ninterrupted\n"), (RANK, "lost\n")], ids=["job", "rank"])
def test_jobs_and_ranks_end(program: str, said: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOSES + program, str(tmp_path / "config.yaml")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr) == (130, said)
