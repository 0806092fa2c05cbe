import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nemo_ext.rl.verifiers.workers import TimeLimitError, WorkerError, WorkerPool

HANGS = (9, 10**9)
"""Arguments of operator:pow that take minutes in C code, where no Python signal handler runs."""
SLEEPS = "__import__('time').sleep(60)"
"""Expression for builtins:eval that takes a minute, without using a core."""


@pytest.fixture
def power() -> Iterator[WorkerPool]:
    pool = WorkerPool("operator:pow", time_limit=1, workers=2)
    yield pool
    pool.close()


@pytest.fixture
def evaluating() -> Iterator[WorkerPool]:
    pool = WorkerPool("builtins:eval", time_limit=1, workers=2)
    yield pool
    pool.close()


_others: set[int] = set()


@pytest.fixture(autouse=True)
def _workers_of_other_tests() -> None:
    """Ignore workers of environments that other tests created."""
    _others.clear()
    _others.update(worker.pid for worker in workers())


def workers() -> list[psutil.Process]:
    """Workers that this process started in the test."""
    children = [child for child in psutil.Process().children() if child.pid not in _others]
    children = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]  # another test's, not waited for
    return [child for child in children if "verifiers.workers" in " ".join(child.cmdline())]


def gone(pids: list[int]) -> bool:
    """True if the processes exit within two minutes; normally it takes seconds, unless the machine is busy."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_calls_and_their_order(power: WorkerPool) -> None:
    assert [power.call(2, exponent) for exponent in range(5)] == [1, 2, 4, 8, 16]
    assert len(workers()) == 1  # one at a time needs one


def test_the_time_limit_holds_in_c_code_and_the_pool_lives_on(power: WorkerPool) -> None:
    power.call(2, 2)
    (before,) = [worker.pid for worker in workers()]

    with pytest.raises(TimeLimitError, match="time limit of 1 s"):
        power.call(*HANGS)

    assert power.call(2, 3) == 8
    assert before not in [worker.pid for worker in workers()]


def test_the_time_limit_holds_in_a_regular_expression() -> None:
    pool = WorkerPool("re:findall", time_limit=1, workers=1)
    with pytest.raises(TimeLimitError):
        pool.call("(a+)+$", "a" * 60 + "b")
    assert pool.call("a+", "aab") == ["aa"]
    pool.close()


def test_what_a_function_raises_is_an_error(power: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        power.call(0, -1)
    assert power.call(2, 1) == 2


def test_a_function_that_is_not_there_is_an_error() -> None:
    with pytest.raises(WorkerError, match="ModuleNotFoundError"):
        WorkerPool("no_such_module:f", time_limit=1).call()


def test_memory_is_limited() -> None:
    pool = WorkerPool("operator:mul", time_limit=30, workers=1, memory=512)
    with pytest.raises(WorkerError, match="MemoryError"):
        pool.call("x", 10**9)
    pool.close()


def test_a_worker_that_exits_is_an_error_and_is_replaced() -> None:
    pool = WorkerPool("os:_exit", time_limit=30, workers=1)
    for _ in range(2):
        with pytest.raises(WorkerError, match="status 3"):
            pool.call(3)
    pool.close()


def test_an_idle_worker_that_was_killed_is_replaced(power: WorkerPool) -> None:
    power.call(2, 2)
    (worker,) = workers()
    worker.kill()
    assert gone([worker.pid])
    assert power.call(2, 3) == 8


def test_workers_do_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    pool = WorkerPool("os:getenv", time_limit=30, workers=1)
    assert pool.call("API_KEY") is None
    pool.close()


def test_printed_output_is_not_the_result() -> None:
    pool = WorkerPool("os:system", time_limit=30, workers=1)
    assert [pool.call("echo 1"), pool.call("exit 0")] == [0, 0]
    pool.close()


def test_a_ctrl_c_at_the_terminal_does_not_reach_workers(power: WorkerPool) -> None:
    power.call(2, 2)
    (worker,) = workers()
    assert os.getpgid(worker.pid) != os.getpgid(0)


def test_an_interrupted_call_leaves_no_worker_and_no_answer(evaluating: WorkerPool) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    evaluating.call("4")
    assert len(workers()) == 1
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            evaluating.call(SLEEPS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not workers()
    assert evaluating.call("8") == 8


def test_threads_share_the_workers(power: WorkerPool) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda exponent: power.call(2, exponent), range(100))) == [2**n for n in range(100)]
    assert len(workers()) <= 2


def test_time_outs_in_some_threads_do_not_mix_up_the_others(evaluating: WorkerPool) -> None:
    def call(number: int) -> int | str:
        try:
            return evaluating.call(SLEEPS if number % 20 == 0 else str(number))
        except TimeLimitError:
            return "late"

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(40))) == [n if n % 20 else "late" for n in range(40)]


def test_an_event_loop_runs_on_meanwhile(evaluating: WorkerPool) -> None:
    async def both() -> tuple[int, list[int]]:
        slow = asyncio.create_task(asyncio.to_thread(evaluating.call, SLEEPS))
        ticks = 0
        quick = [await asyncio.to_thread(evaluating.call, f"2**{exponent}") for exponent in range(3)]
        while not slow.done():
            ticks += 1
            await asyncio.sleep(0.01)
        with pytest.raises(TimeLimitError):
            await slow
        return ticks, quick

    ticks, quick = asyncio.run(both())
    assert ticks > 3 and quick == [1, 2, 4]


def test_closing_ends_all_workers() -> None:
    pool = WorkerPool("operator:pow", time_limit=1, workers=2)
    pool.call(2, 2)
    pids = [worker.pid for worker in workers()]
    pool.close()
    assert pids and gone(pids)
    with pytest.raises(WorkerError, match="closed"):
        pool.call(2, 2)


def test_a_garbage_collected_pool_ends_its_workers() -> None:
    pool = WorkerPool("operator:pow", time_limit=1)
    pool.call(2, 2)
    pids = [worker.pid for worker in workers()]
    del pool
    assert pids and gone(pids)


def test_a_copy_has_separate_workers(power: WorkerPool) -> None:
    copy = pickle.loads(pickle.dumps(power))
    assert (power.call(2, 2), copy.call(2, 3), copy.time_limit) == (4, 8, 1.0)
    assert len(workers()) == 2
    copy.close()


def test_a_forked_child_has_separate_workers(power: WorkerPool) -> None:
    power.call(2, 2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if all(power.call(3, n) == 3**n for n in range(20)) and len(workers()) == 1 else 2
            power.close()
        finally:
            os._exit(status)
    answers = [power.call(2, n) for n in range(20)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert answers == [2**n for n in range(20)]


def test_a_child_forked_while_all_workers_are_busy_is_not_held_up() -> None:
    pool = WorkerPool("builtins:eval", time_limit=3, workers=1)
    pool.call("4")
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(pool.call, SLEEPS)
        while pool._idle:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            try:
                status = 0 if pool.call("32") == 32 else 2
                pool.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert isinstance(busy.exception(), TimeLimitError)
    pool.close()


@pytest.mark.parametrize(
    "settings",
    [{"time_limit": 0}, {"time_limit": True}, {"workers": -1}, {"memory": float("inf")}, {"time_limit": "1"}],
)
def test_settings_out_of_range_are_named(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        WorkerPool("operator:pow", **{"time_limit": 1, **settings})


HOST = """
    import os, signal, sys, threading
    import psutil
    from nemo_ext.rl.verifiers.workers import WorkerPool

    pool = WorkerPool("builtins:eval", time_limit=2, workers=2)
    pool.call("4")
    def tell():
        print(*[child.pid for child in psutil.Process().children()], flush=True)
    threading.Timer(0.5, tell).start()
    how = sys.argv[1]
    if how == "ends":
        threading.Event().wait(1)
    else:
        pool.call("__import__('time').sleep(60)")
"""


@pytest.mark.parametrize(("how", "number"), [("ends", None), ("ctrl-c", signal.SIGINT), ("killed", signal.SIGKILL)])
def test_no_worker_outlives_its_host(tmp_path: Path, how: str, number: int | None) -> None:
    script = tmp_path / "host.py"
    script.write_text(textwrap.dedent(HOST))
    host = subprocess.Popen(
        [sys.executable, str(script), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert host.stdout is not None and host.stderr is not None
    pids = [int(pid) for pid in host.stdout.readline().split()]
    assert pids

    if number is not None:
        host.send_signal(number)

    host.wait(20)
    assert gone(pids)
    assert ("KeyboardInterrupt" in host.stderr.read()) == (how == "ctrl-c")
    host.stdout.close()
    host.stderr.close()
