"""Misbehaving programs, in every kind of isolation that works on this machine."""

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nemo_ext.rl.sandbox.box import Box, Run
from nemo_ext.rl.sandbox.inside import confinement
from nemo_ext.rl.sandbox.isolation import BusyError, SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox

LIMITS = Limits(wall_seconds=60, memory_megabytes=300, output_bytes=100_000, disk_megabytes=8)
TIGHT = replace(LIMITS, cpu_seconds=1, wall_seconds=1.5)
KINDS = ("namespaces", "processes")


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Separate folder for these sandboxes' temporary files, since tests that run in parallel may have sandboxes too."""
    tmp_path_factory.getbasetemp()  # not in here
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        os.chmod(made, 0o755)  # programs run as another user
        patch.setenv("TMPDIR", made)
        patch.setattr(tempfile, "tempdir", made)
        yield


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox(limits=LIMITS, isolation=request.param)
        made.describe()
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def leaves_nothing(sandbox: Sandbox) -> Iterator[None]:
    """Check after every test that no process, no file of a sandbox and no open descriptor is left."""

    sandbox.describe()
    before = len(os.listdir("/proc/self/fd"))
    yield
    nursery = sandbox._nursery._process
    assert nursery is not None
    deadline = time.monotonic() + 60

    def left() -> list[object]:
        files = Path(tempfile.gettempdir()).glob("nemo_ext_sandbox_*")
        return [*psutil.Process(nursery.pid).children(recursive=True), *files]

    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left()
    if len(os.listdir("/proc/self/fd")) != before:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_program_reads_and_writes(sandbox: Sandbox) -> None:
    run = sandbox.run("import sys\nprint(int(input()) ** 2)\nprint('oh', file=sys.stderr)\nexit(3)", stdin="12\n")

    assert (run.ended, run.status, run.stdout, run.stderr) == ("exit", 3, b"144\n", b"oh\n")


def test_a_program_has_the_libraries_that_contests_have(sandbox: Sandbox) -> None:
    source = """
import threading, sys
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main(): print(depth(20000), sum(np.arange(4)), Counter("aab")["a"])
import numpy as np
threading.Thread(target=main).start()
"""
    assert sandbox.run(source).stdout == b"20000 6 2\n"


def test_standard_input_is_read_in_every_way(sandbox: Sandbox) -> None:
    ways = ("open(0).read()", "__import__('sys').stdin.buffer.read().decode()", "open('/dev/stdin').read()")

    for way in (*ways, "__import__('os').read(0, 99).decode()"):
        assert sandbox.run(f"print({way})", stdin="a b").stdout == b"a b\n", way


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_cpp(sandbox: Sandbox) -> None:
    square = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * n; }"

    assert sandbox.run(square, stdin="12", language="cpp").stdout == b"144"
    assert b"error" in sandbox.run("int main() { return x; }", language="cpp").stderr
    assert sandbox.run("int main() { *(volatile int *)0 = 1; }", language="cpp").ended == "signal"
    secret = sandbox.run('#include "/etc/passwd"\nint main() {}', language="cpp")
    assert not secret.ok and b"root:" not in secret.stderr


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("import time\ntime.sleep(60)", {"time"}),
        ("import signal\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", {"cpu", "time"}),
        ("held = []\nwhile True: held.append(bytearray(1 << 24))", {"memory", "exit"}),
        ("while True: print('x' * 1000)", {"output"}),
        ("open('big', 'wb').truncate(1 << 40)", {"exit", "signal"}),
        ("i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 20))\n    i += 1", {"disk", "exit"}),
        ("import os\nos.kill(os.getpid(), 11)", {"signal"}),
        pytest.param("while True: pass", {"cpu", "time"}, marks=pytest.mark.slow),
        pytest.param("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"cpu", "time"}, marks=pytest.mark.slow),
        pytest.param(
            "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
            {"cpu", "time", "exit", "disk"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_programs_over_a_limit_are_ended(sandbox: Sandbox, source: str, ended: set[str]) -> None:
    began = time.monotonic()

    run = sandbox.run(source, limits=TIGHT if "time" in ended else LIMITS)

    assert run.ended in ended and not run.ok, run
    assert time.monotonic() - began < 30


def test_a_fork_bomb_stays_within_its_limits(sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"

    assert not sandbox.run(bomb, limits=TIGHT).ok
    assert sandbox.run("print(1)").ok


def test_more_processes_than_allowed_are_refused(sandbox: Sandbox) -> None:
    source = """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
"""
    run = sandbox.run(source)

    found = sandbox.describe()
    # Without namespaces the kernel counts the user's other processes too, so the supervisor's own limits apply.
    assert run.ended in ("processes", "memory") or (
        run.ok and int(run.stdout) <= (LIMITS.processes if found.own_user else 199)
    )


def test_processes_that_outlive_their_parent_are_ended(sandbox: Sandbox) -> None:
    mark = f"nemo_ext_daemon_{os.getpid()}"
    source = f"""
import ctypes, os, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, b"{mark[:15]}")
            time.sleep(60)
        os._exit(0)
    for _ in range(5):
        if os.fork() == 0: os._exit(0)
except OSError:
    pass
time.sleep(0.1)
print("parent")
"""
    run = sandbox.run(source)

    assert run.stdout == b"parent\n" and run.seconds < 30
    assert not [process for process in psutil.process_iter(["name"]) if process.info["name"] == mark[:15]]


def test_signals_reach_no_other_process(sandbox: Sandbox) -> None:
    host = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    # Signal all processes only where a namespace or a separate user is in place: if a change broke the confinement,
    # this test would otherwise kill every process of whoever runs it.
    namespaces = sandbox.describe().namespaces
    source = f"""
import os
alone = ({namespaces} and os.getpid() < 100) or os.getuid() > 100_000_000
for target in ({host.pid}, -{host.pid}, os.getppid(), *([-1] if alone else [])):
    for number in (15, 9):
        try: os.kill(target, number)
        except OSError: pass
print("still here")
"""
    run = sandbox.run(source)

    # A signal to all may end the program itself, and nothing more.
    assert run.stdout == b"still here\n" or run.ended == "signal"
    assert host.poll() is None
    host.communicate(b"\n")
    assert host.returncode == 0
    assert sandbox.run("print(1)").ok


def test_programs_cannot_read_the_hosts_secrets(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    source = f"""
import os
print(sorted(os.environ))
places = ["/proc/%d/environ" % os.getppid(), "/proc/{os.getpid()}/environ", "/proc/1/environ", {str(secret)!r}]
for place in places:
    try: print(b"hunter2" in open(place, "rb").read())
    except OSError as error: print(type(error).__name__)
"""
    found = sandbox.describe()
    run = sandbox.run(source)

    assert run.ok, run.stderr
    assert "HF_TOKEN" not in run.stdout.decode() and b"hunter2" not in run.stdout
    if found.namespaces or found.landlock or found.own_user:
        assert b"True" not in run.stdout


def test_no_descriptor_of_the_host_is_inherited(sandbox: Sandbox, tmp_path: Path) -> None:
    kept = os.open(tmp_path / "kept", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(kept, True)
    source = """
import os
found = []
for number in range(1000):
    try: held = os.fstat(number)
    except OSError: continue
    found.append([held.st_dev, held.st_ino])
print(found)
"""
    run = sandbox.run(source)
    held = os.fstat(kept)
    os.close(kept)

    assert run.ok and [held.st_dev, held.st_ino] not in json.loads(run.stdout)


def test_there_is_no_network(sandbox: Sandbox) -> None:
    if sandbox.describe().network == "open":
        pytest.skip("neither network namespaces nor a system call filter here")
    with __import__("socket").create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)\nprint('in')"

        run = sandbox.run(source)

    assert not run.ok and b"in\n" not in run.stdout


def test_files_elsewhere_cannot_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    found = sandbox.describe()
    if not (found.namespaces or found.landlock or found.own_user):
        pytest.skip("without namespaces, Landlock and root a program writes where its user may")
    home = Path.home() / f".nemo_ext_{os.getpid()}"
    places = [str(tmp_path / "here"), str(home), "/usr/nemo_ext_here", "/etc/nemo_ext_here"]
    if found.namespaces or found.landlock:
        places += ["/var/tmp/nemo_ext_here", "/dev/shm/nemo_ext_here"]

    source = f"""
for place in {places!r} + ["own"]:
    try: open(place, "w").write("x"); print(place)
    except OSError: pass
"""
    run = sandbox.run(source)

    assert run.stdout == b"own\n"
    assert not [place for place in places if Path(place).exists()]


def test_runs_of_one_answer_do_not_see_each_others_files_and_names(sandbox: Sandbox) -> None:
    source = "import os\nprint(os.listdir('.'), 'seen' in globals(), input())\nseen = open('left', 'w').write('x')"

    def work(box: Box) -> list[bytes]:
        box.compile_python(source, LIMITS)
        return [run.stdout for run in box.runs([b"1", b"2"], [LIMITS] * 2)]

    assert sandbox.session(work) == [b"[] False 1\n", b"[] False 2\n"]


@pytest.mark.parametrize(
    "vandalism",
    [
        "import os\nos._exit(0)",
        "import os\nos.close(0); os.close(1); os.close(2)",
        "import os\nfor n in range(3, 200):\n    try: os.close(n)\n    except OSError: pass",
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'{}')\n    except OSError: pass",
        "import sys\nsys.stdout.close(); sys.stdin.close()",
        "import sys\nsys.stdin = sys.stdout = sys.stderr = None",
        "import json, os\njson.dumps = os.read = os.write = os.dup2 = None",
        "raise SystemExit('bye')",
        "raise KeyboardInterrupt",
        "import sys\nsys.settrace(lambda *a: 1 / 0)",
        "def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()",
        "import os\nos.chmod('.', 0)",
        "import os\nos.mkdir('a'); os.chmod('a', 0); os.symlink('/', 'b')",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import ctypes\nctypes.string_at(0)",
        "import gc, os\nfor o in gc.get_objects():\n    if isinstance(o, dict) and '_checked' in o: o.clear()",
    ],
)
def test_vandalism_affects_only_its_own_run(sandbox: Sandbox, vandalism: str) -> None:
    def work(box: Box) -> list[Run]:
        box.compile_python(f"print(input(), flush=True)\n{vandalism}", TIGHT)
        return list(box.runs([b"1", b"2", b"3"], [TIGHT] * 3))

    runs = sandbox.session(work)

    assert len(runs) == 3
    # Their output may be lost; no run may print the output of another.
    for number, run in enumerate(runs, 1):
        assert {word for word in run.stdout.decode() if word.isdigit()} <= {str(number)}, run


@pytest.mark.parametrize("number", [32, pytest.param(1024, marks=pytest.mark.deep)])
def test_many_at_once_all_get_results(sandbox: Sandbox, number: int) -> None:
    async def all_of_them() -> list[Run]:
        return await asyncio.gather(*(sandbox.run_async("print(input())", stdin=str(index)) for index in range(number)))

    assert [run.stdout for run in asyncio.run(all_of_them())] == [f"{index}\n".encode() for index in range(number)]


def test_it_can_be_used_from_threads(sandbox: Sandbox) -> None:
    seen: list[bytes] = []
    threads = [threading.Thread(target=lambda: seen.append(sandbox.run("print(7)").stdout)) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == [b"7\n"] * 8


def test_a_request_that_waits_too_long_raises(sandbox: Sandbox) -> None:
    kind = "namespaces" if sandbox.describe().namespaces else "processes"
    narrow = Sandbox(limits=LIMITS, concurrency=1, queue_seconds=0.2, isolation=kind)
    narrow.describe()

    async def two() -> list[Run | BaseException]:
        sleeper = "import time\ntime.sleep(1.5)"
        return await asyncio.gather(narrow.run_async(sleeper), narrow.run_async(sleeper), return_exceptions=True)

    first, second = asyncio.run(two())

    assert isinstance(first, Run) and first.ok
    assert isinstance(second, BusyError) and "queue_seconds" in str(second)
    # The slot that was given up is free again.
    assert narrow.run("print(1)").ok
    narrow.close()


def test_cancelled_programs_end(sandbox: Sandbox) -> None:
    async def cancelled() -> float:
        task = asyncio.create_task(
            sandbox.run_async("import time\ntime.sleep(60)", limits=Limits(wall_seconds=60.0)),
        )
        await asyncio.sleep(0.5)
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 5


def called(sandbox: Sandbox, *codes: str) -> list[Run]:
    """Calls in one session; generous in wall clock, since machines differ."""
    with sandbox.open() as box:
        return [box.call(code, replace(LIMITS, cpu_seconds=2)) for code in codes]


def test_variables_and_files_persist_between_calls(sandbox: Sandbox) -> None:
    first, second, third = called(
        sandbox,
        "x = 6\nopen('f', 'w').write('7')",
        "import sys\nprint(x)\nprint(1, file=sys.stderr)",
        "x * int(open('f').read())",
    )

    assert (first.stdout, second.stdout, third.stdout) == (b"1\n", b"6\n1\n", b"42\n")
    assert json.loads(third.value) == {"error": ""}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f():\n    return 1 / 0\n\nf()", "ZeroDivisionError: division by zero"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("input()", "EOFError"),
        ("exit(3)", "SystemExit: 3"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("import socket\nsocket.socket()", "PermissionError: [Errno 1] Operation not permitted"),
        ("open('/etc/passwd')", "[Errno"),
    ],
)
def test_an_error_of_a_call_is_its_traceback(sandbox: Sandbox, code: str, said: str) -> None:
    failed, next_ = called(sandbox, code, "1 + 1")

    trace = json.loads(failed.value)["error"]
    assert said in trace and "program.py" not in trace and next_.stdout == b"2\n"
    if "Zero" in said:
        assert 'File "<call 1>", line 2, in f\n    return 1 / 0' in trace


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: print('y' * 1000)", {"time"}),
        ("import os\nos._exit(3)", {"exit"}),
        ("import os\nos.kill(os.getpid(), 9)", {"signal"}),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"time", "processes", "memory"}),
    ],
)
def test_a_call_that_ends_the_interpreter_starts_a_new_one(sandbox: Sandbox, code: str, ended: set[str]) -> None:
    _, stopped, next_ = called(sandbox, "x = 1", code, "print('x' in globals())")

    assert stopped.ended in ended and len(stopped.stdout) <= LIMITS.output_bytes and not stopped.value
    assert next_.stdout == b"False\n"


def test_nothing_runs_between_calls(sandbox: Sandbox) -> None:
    count = """
import threading, time
ticks = [0]
def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
while not ticks[0]: time.sleep(0.001)
"""
    with sandbox.open() as box:
        before = box.call(count + "ticks[0]", LIMITS)
        time.sleep(1)
        after = box.call("ticks[0]", LIMITS)

    assert 0 < int(before.stdout) <= int(after.stdout) < int(before.stdout) + 500


def test_a_dead_nursery_is_replaced(sandbox: Sandbox) -> None:
    nursery = sandbox._nursery._process
    assert nursery is not None
    nursery.kill()
    nursery.wait()

    assert sandbox.run("print(1)").ok


@pytest.mark.slow
def test_a_host_that_dies_takes_its_programs_along(sandbox: Sandbox) -> None:
    kind = KINDS[not sandbox.describe().namespaces]
    source = f"""
import psutil, threading, time
from nemo_ext.rl.sandbox.sandbox import Sandbox
sandbox = Sandbox(isolation={kind!r})
box = sandbox.open()
box.call("import subprocess; subprocess.Popen(['sleep', '60'])", sandbox.limits)  # stopped when the host dies
threading.Thread(target=sandbox.run, args=("import time\\ntime.sleep(60)",), daemon=True).start()
while sandbox._nursery is None or sandbox._nursery._process is None: time.sleep(0.01)
while not psutil.Process(sandbox._nursery._process.pid).children(): time.sleep(0.01)
time.sleep(2)  # a host that dies before the supervisor knows the folder leaves the empty folder behind
print(sandbox._nursery._process.pid, flush=True)
time.sleep(60)
"""
    host = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    nursery = psutil.Process(int(host.stdout.readline()))
    below = nursery.children(recursive=True)
    assert below
    host.kill()
    host.communicate()

    gone, alive = psutil.wait_procs([nursery, *below], timeout=120)

    assert not alive and gone


def test_strict_requires_namespaces(sandbox: Sandbox) -> None:
    if sandbox.describe().namespaces:
        strict = Sandbox(strict=True)
        assert strict.describe().namespaces
        strict.close()
    with pytest.raises(ValueError, match="strict"):
        Sandbox(strict=True, isolation="processes")
    with pytest.raises(ValueError, match="did you mean 'namespaces'"):
        Sandbox(isolation="namespace")  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root and a system Python")
def test_root_without_namespaces_runs_programs_as_another_user(sandbox: Sandbox) -> None:
    own = Sandbox(limits=LIMITS, isolation="processes", python="/usr/bin/python3")
    if not own.describe().own_user:
        pytest.skip("another user may not be taken on here")

    source = "import os\nprint(os.getuid() > 0)\nif os.fork() == 0:\n    os.setsid()\n    __import__('time').sleep(60)"
    run = own.run(source)

    assert run.stdout == b"True\n" and run.seconds < 30
    assert own.run("import os\nif os.getuid() > 100_000_000: os.kill(-1, 9)").ended in ("exit", "signal")
    own.close()


def test_limits_are_checked() -> None:
    assert Limits().changed({"cpu_seconds": 3}).cpu_seconds == 3
    with pytest.raises(ValueError, match=r"did you mean 'cpu_seconds'"):
        Limits().changed({"cpu_second": 3})
    with pytest.raises(ValueError, match=r"reference.limits.processes=1.5: .*integer"):
        Limits().changed({"processes": 1.5}, "reference.limits")
    for odd in ({"cpu_seconds": "3"}, {"cpu_seconds": True}, ["cpu_seconds"]):
        with pytest.raises(ValueError, match="limits"):
            Limits().changed(odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"wall_seconds\s+Input should be a finite number"):
        Limits(wall_seconds=float("nan"))


def test_empty_removes_deep_and_forbidden_folders_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inside = tmp_path / "inside"
    inside.mkdir()
    descriptor = os.open(inside, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=descriptor)
        below = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    (inside / "link").symlink_to(outside)
    (inside / "shut").mkdir(mode=0)

    confinement.empty(str(inside))

    assert not list(inside.iterdir()) and (outside / "kept").exists()


def test_a_thread_that_cannot_start_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Sandbox(limits=LIMITS, concurrency=1, queue_seconds=5, isolation="processes")
    narrow.describe()
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "sandbox":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(SandboxError, match="no thread can be started"):
        asyncio.run(narrow.run_async("print(1)"))
    monkeypatch.undo()

    assert narrow.run("print(1)").ok
