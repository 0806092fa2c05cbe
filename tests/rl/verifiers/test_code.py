"""Programs run on tests: right ones, wrong ones, and attempts to cheat."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.rl.environments import make
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.prelude import preloaded, prelude
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.tasks import programs
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers import code
from tests.json_lines import read_jsonl
from tests.rl.gym_data import gym_data

SQUARE = {
    "language": "python",
    "style": "stdin",
    "tests": [{"input": f"{n}\n", "output": f"{n * n}"} for n in (2, 3, 5)],
}
ADD = {
    "language": "python",
    "style": "function",
    "function": "add",
    "tests": [{"args": [1, 2], "expected": 3}, {"args": [[1], [2]], "expected": [1, 2]}],
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(limits=Limits(cpu_seconds=2, wall_seconds=30, memory_megabytes=300))
    yield made
    made.close()


def verdict(source: str, reference: dict[str, Any], sandbox: Sandbox, *, tag: str = "python", **how: Any) -> Verdict:
    response = parse_response(f"Here it is.\n```{tag}\n{source}\n```\nIt works.")
    return code.verify(response, code.check(reference), sandbox=sandbox, **how)


@pytest.mark.parametrize(
    ("source", "reference"),
    [
        ("print(int(input()) ** 2)", SQUARE),
        ("import sys\nn = int(sys.stdin.readline())\nsys.stdout.write(f'  {n * n}.0\\n\\n')\nexit()", SQUARE),
        ("if __name__ == '__main__':\n    print(pow(int(input()), 2))", SQUARE),
        ("def add(a, b): return a + b", ADD),
        ("class Solution:\n    def add(self, a: List[int], b: List[int]) -> List[int]:\n        return a + b", ADD),
        (
            "def add(a, b):\n    return tuple(a + b) if isinstance(a, list) else np.int64(a + b)\nimport numpy as np",
            ADD,
        ),
        ("add = lambda a, b: reduce(operator.add, deque([a, b]))", ADD),
    ],
)
def test_right_programs_are_correct(source: str, reference: dict[str, Any], sandbox: Sandbox) -> None:
    assert verdict(source, reference, sandbox).outcome == "correct"


@pytest.mark.parametrize(
    ("source", "reference", "reason"),
    [
        ("print(4)", SQUARE, "test 1: the output differs from the expected output"),
        ("print(int(input()) ** 2); exit(1)", SQUARE, "test 0: exit status 1"),
        ("print(int(input()) ** 2); 1 / 0", SQUARE, "ZeroDivisionError"),
        ("print(int(input()) ** 2", SQUARE, "does not compile: exit status 1: SyntaxError"),
        ("print(4, 9, 25)", SQUARE, "test 0: the output"),
        ("print('x' * 10**6)", SQUARE, "test 0: over its output limit"),
        ("", SQUARE, "test 0: the output"),
        ("add = 3", ADD, "TypeError"),
        ("def sum(a, b): return a + b", ADD, "no function named 'add'"),
        ("def add(a, b): return 3", ADD, "test 1: the result"),
        ("def add(a, b): return {3}", ADD, "a result of type set cannot be written as JSON"),
        ("def add(a, b): yield a + b", ADD, "generator"),
        ("def add(a, b): return float('nan')", ADD, "test 0: the result"),
        ("def add(a, b):\n    x = []\n    for _ in range(500): x = [x]\n    return x", ADD, "test 0: the result"),
        ("def add(a, b): return 10 ** 10000", ADD, "test 0: the result is not valid JSON"),
    ],
)
def test_wrong_programs_are_wrong_and_the_reason_says_why(
    source: str, reference: dict[str, Any], reason: str, sandbox: Sandbox
) -> None:
    found = verdict(source, reference, sandbox)

    assert found.outcome == "wrong" and found.score == 0 and reason in found.reason, found


@pytest.mark.parametrize(
    "trick",
    [
        "import os\nprint('all tests passed')\nos._exit(0)",
        "class Same:\n    def __eq__(self, other): return True\ndef add(a, b): return Same()",
        "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Same()",
        "import builtins, json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return True",
        "import sys\nsys.exit(0)",
        "import os\nfor n in range(3, 100):\n    try: os.write(n, b'\\0' * 64 + b'{\"ended\": \"exit\"}')\n"
        "    except OSError: pass",
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "def add(a, b): return found[0]['expected']",
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'expected' in frame.f_locals: print(frame.f_locals)\n    frame = frame.f_back\n"
        "def add(a, b): return None",
        "import glob\nprint([open(f).read() for f in glob.glob('/tmp/**', recursive=True)])\ndef add(a, b): pass",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint(4)",
    ],
)
def test_tricks_earn_nothing(trick: str, sandbox: Sandbox) -> None:
    assert verdict(trick, ADD, sandbox).outcome == "wrong"
    assert verdict(trick, SQUARE, sandbox).outcome == "wrong"


# Each prints the number of earlier runs that it can see by what they left behind, which must be 0.
COUNTERS = {
    "module": "import math\nmath.n = getattr(math, 'n', -1) + 1\nprint(math.n)",
    "called module": "import math\ndef f(m): m.n = m.__dict__.get('n', -1) + 1; return m.n\nprint(f(math))",
    "submodule": "import io\nm = io.abc\ntry: m.n += 1\nexcept AttributeError: m.n = 0\nprint(m.n)",
    "function": "from heapq import merge as m\ntry: m.n += 1\nexcept AttributeError: m.n = 0\nprint(m.n)",
    "mangled": "from collections import Counter as _a__C\nclass a:\n    x = __C\n    try: x.n += 1\n"
    "    except AttributeError: x.n = 0\n    print(x.n)",
    "sys": "import sys\nsys.n = getattr(sys, 'n', -1) + 1\nprint(sys.n)",
    "sys.modules": "import sys\nprint(sum(k.startswith('zz') for k in sys.modules))\n"
    "sys.modules['zz%d' % len(sys.modules)] = sys",
    "builtins": "import builtins\nbuiltins.n = getattr(builtins, 'n', -1) + 1\nprint(n)",
    "__builtins__": "b = globals()['__builtins__']\ng = b if isinstance(b, dict) else vars(b)\n"
    "g['n'] = g.get('n', -1) + 1\nprint(n)",
    "class": "from fractions import Fraction\nFraction.n = getattr(Fraction, 'n', -1) + 1\nprint(Fraction.n)",
    "class of an instance": "from collections import Counter\nC = Counter().__class__\n"
    "C.n = getattr(C, 'n', -1) + 1\nprint(C.n)",
    "shared mapping": "from functools import cache\n@cache\ndef f(): pass\nd = f.cache_info()._field_defaults\n"
    "d['n'] = d.get('n', -1) + 1\nprint(d['n'])",
    "defaults": "import bisect, heapq\nd = heapq.merge.__kwdefaults__\nd['n'] = d.get('n', -1) + 1\nprint(d['n'])",
    "exception": "import math\ntry: math.nothing\nexcept AttributeError as e:\n    m = e.obj\n"
    "    m.n = vars(m).get('n', -1) + 1\n    print(m.n)",
    "annotation": "from collections import Counter\nclass K:\n    def __getitem__(self, k):\n"
    "        try: k.n += 1\n        except AttributeError: k.n = 0\n        print(k.n)\nlist = K()\nx: list[Counter]",
    "pattern": "match 1 .real:\n    case object(__class__=c): pass\nimport heapq\nmatch heapq.merge:\n"
    "    case object(__globals__=g): pass\ng['n'] = g.get('n', -1) + 1\nprint(g['n'])",
    "finalizer": "class A:\n    def __del__(self):\n        import math\n"
    "        math.n = getattr(math, 'n', -1) + 1\na = A()\ndel a\nimport math\nprint(math.n)",
    "gc": "import gc\nprint(sum(type(o).__name__ == 'Zz' for o in gc.get_objects()))\n"
    "class Zz: pass\nz = Zz()\nz.z = z\ngc.disable()",
    "subclasses": "print(sum(c.__name__ == 'Zz' for c in object.__subclasses__()))\nclass Zz: pass\n"
    "import gc\ngc.disable()",
    "atexit": "import atexit\nprint(atexit._ncallbacks())\natexit.register(len, ())",
    "thread": "import threading\nprint(threading.active_count() - 1)\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "descriptors": "import os\nn = 0\ntry:\n    while os.fstat(40 + n): n += 1\nexcept OSError: pass\n"
    "print(n)\nos.dup2(1, 40 + n)",
    "position": "import os\nn = os.lseek(0, 0, 1)\nprint(n)\nos.lseek(0, n + 1, 0)",
    "flags": "import fcntl, os\nf = fcntl.fcntl(0, fcntl.F_GETFL)\nn = bool(f & 1024) + 2 * bool(f & 2048)\n"
    "print(n)\nfcntl.fcntl(0, fcntl.F_SETFL, 1024 * ((n + 1) & 1) + 2048 * ((n + 1) >> 1))",
    "permissions": "import os\nn = os.stat(0).st_mode >> 9 & 3\nprint(n)\ntry: os.fchmod(0, 511 + (n + 1 << 9))\n"
    "except OSError: pass",
    "environment": "import os\nos.environ['N'] = str(int(os.environ.get('N', -1)) + 1)\nprint(os.environ['N'])",
    "files": "import os\nprint(len(os.listdir('.')))\nopen('f%d' % len(os.listdir('.')), 'w').close()",
    "signals": "import signal\nf = signal.getsignal(10)\nn = getattr(f, 'n', -1) + 1\ndef g(*a): pass\n"
    "g.n = n\nsignal.signal(10, g)\nprint(n)",
    "print": "import builtins\nold = print\nn = getattr(old, 'n', -1) + 1\ndef new(*a): old(*a)\nnew.n = n\n"
    "builtins.print = new\nnew(n) if n == 0 else old.__closure__ or old(n)",
    "hooks": "import sys\nn = len(sys.meta_path)\nsys.path.append('n')\nprint(sys.path.count('n') - 1)",
    "__main__": "import sys\nm = sys.modules['sys']\nd = m.__dict__.setdefault('kept', [])\nprint(len(d))\nd.append(1)",
    "digits": "import sys\nn = sys.get_int_max_str_digits() % 10\nprint(n)\nsys.set_int_max_str_digits(50001 + n)",
    "memory": "import mmap, os\nf = os.open('m', os.O_RDWR | os.O_CREAT)\nos.truncate(f, 9)\nm = mmap.mmap(f, 9)\n"
    "print(m[0])\nm[0] += 1",
}
ONE_AFTER_THE_OTHER = """
import io, json, os, sys
for name, source in json.load(open(sys.argv[1])).items():
    if os.fork():
        os.wait()
        continue
    os.mkdir(name)
    os.chdir(name)
    os.dup2(os.open("in", os.O_RDWR | os.O_CREAT), 0)
    os.unlink("in")
    os.chmod(0, 0o600)
    sys.set_int_max_str_digits(50000)
    real, said = sys.stdout, io.StringIO()
    sys.stdout = said
    try:
        for _ in range(3):
            exec(source, {"__name__": "__main__"})
    except BaseException as error:
        said.write(repr(error))
    real.write(json.dumps([name, said.getvalue().split()]) + chr(10))
    real.flush()
    os._exit(0)
"""


def test_counters_count_where_runs_share_a_process(tmp_path: Path) -> None:
    (tmp_path / "programs").write_text(json.dumps(COUNTERS))
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, "programs"]

    said = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout

    counted = dict(json.loads(line) for line in said.splitlines())
    assert counted == {name: ["0", "1", "2"] for name in COUNTERS}


COUNTED = {**SQUARE, "tests": [{"input": "12", "output": "0"}, {"input": "12", "output": "1"}]}


@pytest.mark.parametrize("name", COUNTERS)
def test_no_run_sees_what_another_left(name: str, sandbox: Sandbox) -> None:
    found = verdict(COUNTERS[name], COUNTED, sandbox, partial=True)

    assert found.outcome == "wrong" and found.score == 0.5, found


def test_no_call_sees_what_another_left(sandbox: Sandbox) -> None:
    calls = {**ADD, "tests": [{"args": [], "expected": 0}, {"args": [], "expected": 1}]}
    source = "import math\ndef add():\n    math.n = getattr(math, 'n', -1) + 1\n    return math.n"
    asserts = {"language": "python", "style": "asserts", "tests": ["assert add() == 0", "assert add() == 1"]}

    assert verdict(source, calls, sandbox, partial=True).score == 0.5
    assert verdict(source, asserts, sandbox, partial=True).score == 0.5


@pytest.mark.slow
def test_no_run_sees_what_another_left_without_namespaces() -> None:
    sandbox = Sandbox(limits=Limits(cpu_seconds=2, wall_seconds=30, memory_megabytes=300), isolation="processes")
    for name, source in COUNTERS.items():
        found = verdict(source, COUNTED, sandbox, partial=True)
        assert found.outcome == "wrong" and found.score == 0.5, (name, found)
    sandbox.close()


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 2 * n - 1 + f(n - 1) if n else 0\n"
        "print(f(int(sys.stdin.read())))",
        "import heapq\nfrom collections import *\nprint(int(input()) ** 2)",
        "from typing import List\nfrom collections import Counter, deque\ninput = sys.stdin.readline\n"
        "class Node:\n    def __init__(self, n: int): self.n = n\n    def __lt__(self, o): return self.n < o.n\n"
        "def f(x: List[int]) -> int:\n    string = x.copy()\n    return max(Node(n) for n in string).n\n"
        "print(sum(Counter([f([int(input())])]).elements()) ** 2)",
        "import functools\n@functools.lru_cache(None)\ndef f(n): return n * n\nprint(f(int(open(0).read())))",
        "import threading\nthreading.Thread(target=lambda: print(int(input()) ** 2)).start()",
        "import os\nprint(int(input()) ** 2, flush=True)\nos._exit(0)",
        "import sys\nprint(int(input()) ** 2)\nsys.exit(0)",
        "import numpy as np\nprint(np.square(int(input())))",
        "n = int(input())\nprint('\\n' * 60000 + str(n * n))",
    ],
)
def test_honest_programs_are_right(source: str, sandbox: Sandbox) -> None:
    assert verdict(source, SQUARE, sandbox).outcome == "correct"


@pytest.mark.parametrize("source", ["# add", "x = 'add'", "class A:\n    add = 3", "def f(x): return x.add"])
def test_imports_for_contests_are_not_an_answer(source: str, sandbox: Sandbox) -> None:
    assert "no function named 'add'" in verdict(source, ADD, sandbox).reason


def test_expected_outputs_never_enter_the_sandbox(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    from nemo_ext.rl.sandbox.inside import wire

    real = wire.send
    monkeypatch.setattr(
        wire,
        "send",
        lambda to, header, blobs=(): (sent.append(repr((header, blobs)).encode()), real(to, header, blobs)),
    )
    reference = {**SQUARE, "tests": [{"input": "2", "output": "neverthere"}]}

    assert verdict("print(input())", reference, sandbox).outcome == "wrong"
    assert sent and not any(b"neverthere" in message for message in sent)


def test_only_the_answer_counts_not_the_trace(sandbox: Sandbox) -> None:
    right = "```python\nprint(int(input()) ** 2)\n```"
    reference = code.check(SQUARE)

    in_trace = code.verify(parse_response(f"<think>{right}</think>Done."), reference, sandbox=sandbox)
    cut_off = code.verify(parse_response(f"<think>{right}"), reference, sandbox=sandbox)
    after = code.verify(parse_response(f"<think>```python\n1\n```</think>{right}"), reference, sandbox=sandbox)

    assert (in_trace.outcome, cut_off.outcome, after.outcome) == ("wrong", "wrong", "correct")


def test_partial_scores_are_shares_of_all_tests(sandbox: Sandbox) -> None:
    source = "n = int(input())\nprint(n * n if n != 3 else 0)"

    assert verdict(source, SQUARE, sandbox, partial=True).score == pytest.approx(2 / 3)
    assert verdict(source, SQUARE, sandbox).score == 0


def test_tolerance_applies_only_to_tests_that_set_it(sandbox: Sandbox) -> None:
    exact = {**SQUARE, "tests": [{"input": "", "output": "0.5 x"}]}
    near = {**SQUARE, "tests": [{"input": "", "output": "0.5 x", "tolerance": 1e-3}]}

    assert verdict("print('0.5001 x')", exact, sandbox).outcome == "wrong"
    assert verdict("print('0.5001 x')", near, sandbox).outcome == "correct"
    assert verdict("print('nan x')", near, sandbox).outcome == "wrong"
    assert verdict("print('0.6 x')", near, sandbox).outcome == "wrong"


def test_limits_of_a_reference_apply(sandbox: Sandbox) -> None:
    quick = {**SQUARE, "limits": {"wall_seconds": 0.5}}

    found = verdict("import time\ntime.sleep(5)", quick, sandbox)

    assert found.outcome == "wrong" and "time limit" in found.reason


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_cpp(sandbox: Sandbox) -> None:
    reference = {**SQUARE, "language": "cpp"}
    right = '#include <cstdio>\nint main() { int n; scanf("%d", &n); printf("%d", n * n); }'

    assert verdict(right, reference, sandbox, tag="cpp").outcome == "correct"
    assert verdict(right.replace("n * n", "4"), reference, sandbox, tag="c++").outcome == "wrong"
    assert "does not compile" in verdict("int main() {", reference, sandbox, tag="cpp").reason
    assert verdict("print(int(input()) ** 2)", reference, sandbox).reason.startswith(
        "the answer has no fenced cpp block"
    )


def test_no_compiler_is_an_error_that_says_what_to_install() -> None:
    without = Sandbox()
    without._settings = replace(without._settings, compiler=None)

    found = verdict("int main() {}", {**SQUARE, "language": "cpp"}, without, tag="cpp")

    assert found.outcome == "error" and "apt-get install g++" in found.reason
    without.close()


def test_a_request_that_waits_too_long_is_an_error_not_a_wrong_answer() -> None:
    environment = make("code", {"concurrency": 1, "queue_seconds": 0.2})
    reference = environment.check({**SQUARE, "limits": {"wall_seconds": 2.0}})
    slow = parse_response("```python\nimport time\ntime.sleep(60)\n```")

    async def two() -> list[Verdict]:
        assert environment.verify is not None and environment.waits
        return await asyncio.gather(*(environment.verify(slow, reference) for _ in range(2)))  # type: ignore[arg-type]

    first, second = asyncio.run(two())

    assert (first.outcome, second.outcome) == ("wrong", "error")


def test_a_sandbox_that_fails_is_an_error(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: object) -> None:
        raise SandboxError("broken")

    monkeypatch.setattr(sandbox, "session", fail)

    assert verdict("print(1)", SQUARE, sandbox) == Verdict.error("broken", "print(1)")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "x" * 1_000_000,
        "```python\n" + "x" * 1_000_000 + "\n```",
        "```python\n" + "(" * 5000 + "\n```",
        "```python\n" + "-" * 200_000 + "1\n```",
        "```python\nprint('\0')\n```",
        "```python\nprint('\udcff')\n```",
        "```python\n\\boxed{4}\n```",
        "```python\nprint('٤')\n```",
        "```python\nprint('NaN')\n```",
        "```python\nprint('[' * 60000)\n```",
        "```python\n```",
        "```python",
        "```" * 100_000,
        bytes(range(256)).decode("latin-1"),
    ],
)
def test_adversarial_answers_are_wrong(answer: str, sandbox: Sandbox) -> None:
    for reference in (SQUARE, ADD):
        found = code.verify(parse_response(answer), code.check(reference), sandbox=sandbox)
        assert found.outcome == "wrong", found.reason


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("```python\na\n```", "a"),
        ("```py\na\n```\nand\n```python\nb\nc\n```", "b\nc"),
        ("```python\na\n```\nIt prints\n```\n4\n```", "a"),
        ("```\na\n```", "a"),
        ("```cpp\na\n```", None),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a"),
        ("  ```Python title\n  a\n  ```", "a"),
        ("1. So:\n\n   ```python\n   if a:\n       b\n\n   ```", "if a:\n    b\n"),
        ("- ```python\n  if a:\n      b\n  ```", "if a:\n    b"),
        ("\t```python\n\tif a:\n\t\tb\n\t```", "if a:\n\tb"),
        ("  ```python\na\n  b\n  ```", "a\nb"),
        ('````python\na = """\n```\n"""\n````', 'a = """\n```\n"""'),
        ("```python\na\n````", "a"),
        ("~~~python\na\n~~~", "a"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb"),
        ("````markdown\n```python\na\n```\n````\n```python\nb\n```", "b"),
        ("a", None),
    ],
)
def test_program_in_an_answer(answer: str, expected: str | None) -> None:
    assert code.program(answer, code.TAGS["python"]) == expected


@pytest.mark.parametrize(
    ("mine", "expected", "same"),
    [
        (b"1 2\n", b"1 2", True),
        (b"\n 1  2 \r\n", b"1 2\n\n", True),
        (b"1\n\n2", b"1\n2", False),
        (b"1\n2", b"1 2", False),
        (b"1.50", b"1.5", True),
        (b"50000000000000000", b"50000000000000001", False),
        (b"Yes", b"yes", False),
        (b"a 1.0", b"a 1", False),
        (b"1e999999", b"1e999998", False),
        (b"NaN", b"NaN", True),
        (b"NaN", b"1", False),
        ("٤".encode(), b"4", False),
        (b"", b"", True),
        (b"\xff", "ÿ".encode(), False),
    ],
)
def test_outputs_compare_by_lines_and_words(mine: bytes, expected: bytes, same: bool) -> None:
    assert code.same_output(mine, expected) is same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": "pythn"}, "reference.language='pythn'.*'python'"),
        ({"style": None}, "reference.style=None"),
        ({"tests": []}, r"reference.tests=\[\].*at least 1"),
        ({"tests": [{"input": "1"}]}, r"reference.tests\[0\]: the key 'output' is missing"),
        ({"tests": [{"input": 1, "output": ""}]}, r"reference.tests\[0\]: input=1: .*string"),
        ({"tests": [{"input": "", "output": "", "tolerance": 2}]}, r"tests\[0\]: tolerance=2: .*less than 1"),
        ({"tests": [{"input": "", "output": "", "tolerance": float("nan")}]}, r"tests\[0\]: tolerance=nan: .*finite"),
        ({"tests": SQUARE["tests"] * 20}, r"reference.tests has 60 tests, more than max_tests \(50\)"),
        ({"function": "f"}, r"reference.function='f' applies only to style function"),
        ({"tests": [{"input": "\ud800", "output": ""}]}, r"tests\[0\]: .*surrogates"),
        ({"limits": {"processes": True}}, r"reference.limits.processes=True"),
        ({"limits": {"seconds": 1}}, r"reference.limits: unknown key 'seconds': did you mean"),
        ({"test": 1}, r"reference: unknown key 'test': did you mean 'tests'"),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code.check({**SQUARE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language": "cpp"}, r"reference.language must be python for style function, not 'cpp'"),
        ({"function": "a b"}, r"reference.function must be the name of the function to test, not 'a b'"),
        ({"tests": [{"args": 1, "expected": 1}]}, r"reference.tests\[0\]: args=1: .*list"),
        ({"tests": [{"kwargs": {1: 2}, "expected": 1}]}, r"tests\[0\]: kwargs\.1"),
        ({"tests": [{"expected": 1, "tolerance": True}]}, r"tests\[0\]: tolerance=True"),
        ({"tests": [{"args": [], "expected": float("nan")}]}, r"tests\[0\]: args, kwargs and expected must be JSON"),
    ],
)
def test_a_functions_reference_is_checked_too(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code.check({**ADD, **change})


def test_a_functions_values_may_be_nested_deep() -> None:
    deep = json.loads("[" * 300 + "]" * 300)
    (test,) = code.check({**ADD, "tests": [{"args": (deep,), "expected": deep}]}).tests
    assert json.loads(test.input)["args"] == [test.expected] == [deep]


def test_imports_that_contests_omit_are_added() -> None:
    lines = prelude("def f(x: List[int]): return deque(math.sqrt(y) for y in x)").splitlines()
    assert sorted(lines) == [
        "from collections import deque",
        "from math import sqrt",
        "from typing import List",
        "import math",
    ]
    assert preloaded("import os.path, numpy as np\nfrom math import pi\nimport antigravity, torch") == [
        "os",
        "numpy",
        "math",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


@given(JSON, JSON, st.none() | st.floats(0, 0.5))
def test_values_compare_without_raising_and_equal_ones_are_equal(one: Any, other: Any, tolerance: Any) -> None:
    assert code.same_value(one, other, tolerance) in (True, False)
    if "nan" not in repr(one).lower():
        assert code.same_value(json.loads(json.dumps(one)), one, tolerance)


@given(st.binary(max_size=60), st.binary(max_size=60), st.none() | st.floats(0, 0.5))
def test_outputs_compare_without_raising(one: bytes, other: bytes, tolerance: float | None) -> None:
    assert code.same_output(one, other, tolerance) in (True, False)
    assert code.same_output(b"\n" + one + b" \n", one, tolerance)


@given(st.lists(st.sampled_from(["```", "```python", "```cpp", "x", " ", "\n", "`", "\0", "\udcff"]), max_size=30))
def test_finding_a_program_never_raises(parts: list[str]) -> None:
    found = code.program("".join(parts), code.TAGS["python"])
    assert found is None or all(line in "".join(parts) for line in found.split("\n"))


@given(st.text(max_size=200))
def test_preludes_of_any_text_are_programs(text: str) -> None:
    compile(prelude(text), "prelude", "exec")
    assert isinstance(preloaded(text), list)


SHARED = Sandbox(limits=Limits(cpu_seconds=2, wall_seconds=10))


@pytest.mark.slow
@settings(suppress_health_check=list(HealthCheck))
@given(st.text(alphabet="()[]{}:\n =+-*/abc123'\"\\\t,.@", max_size=80))
def test_any_text_as_a_program_gets_a_verdict(text: str) -> None:
    assert verdict(text, SQUARE, SHARED).outcome == "wrong"


class TestGym:
    """Verdicts of NeMo Gym's server on the data that it ships."""

    def test_its_rollouts_have_the_same_rewards(self, sandbox: Sandbox) -> None:
        data = gym_data("code_gen")
        tasks, rollouts = (read_jsonl(data / f"{name}.jsonl") for name in ("example", "example_rollouts"))
        rewards = {}

        def prompt(record: dict[str, Any]) -> str:
            return str(record["responses_create_params"]["input"][0]["content"])

        for task in tasks:
            tests = task["verifier_metadata"]["unit_tests"]
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            reference = {**SQUARE, "tests": [{"input": given, "output": output} for given, output in pairs]}
            (rollout,) = [one for one in rollouts if prompt(one) == prompt(task)]
            response = Response(text="", answer=rollout["extracted_model_output"])
            found = code.verify(response, code.check(reference, max_tests=100), sandbox=sandbox)
            rewards[task["hash_id"]] = (found.score, rollout["reward"])

        assert len(rewards) == 5 and all(ours == gyms for ours, gyms in rewards.values()), rewards

    @pytest.mark.parametrize(
        ("text", "given", "output", "reward"),
        [
            # Cases of its own tests (tests/test_app.py).
            ("```python\nn=int(input())\nprint(n+1)\n```", "3\n", "9", 0),
            ("```python\nn=int(input())\nprint(n*n)\n```", "3\n", "9", 1),
            ("n=int(input())\nprint(n*n)", "2\n", "4", 0),
            ("```python\nprint('hello'  # Missing closing parenthesis\n```", "\n", "hello", 0),
            ("```python\nn=int(input())\nprint(n/0)\n```", "5\n", "error", 0),
        ],
    )
    def test_its_tests_cases(self, text: str, given: str, output: str, reward: int, sandbox: Sandbox) -> None:
        reference = code.check({**SQUARE, "tests": [{"input": given, "output": output}]})

        assert code.verify(parse_response(text), reference, sandbox=sandbox).score == reward


class TestPrograms:
    """Tasks generated by this package."""

    def test_solutions_are_right_and_nothing_else_is(self, sandbox: Sandbox) -> None:
        made = list(programs.tasks(24, seed=3))

        for task, other in zip(made, [*made[1:], made[0]], strict=True):
            reference = code.check(task.reference)
            assert code.verify(parse_response(programs.solution(task)), reference, sandbox=sandbox).outcome == "correct"
            wrong = code.verify(parse_response(programs.solution(other)), reference, sandbox=sandbox)
            assert wrong.outcome == "wrong", (task.prompt, other.prompt)

    def test_a_task_depends_on_seed_level_and_number_alone(self) -> None:
        assert list(programs.tasks(30, seed=1))[:7] == list(programs.tasks(7, seed=1))
        assert list(programs.tasks(7, seed=1)) != list(programs.tasks(7, seed=2))
        assert {task.reference["style"] for task in programs.tasks(9, seed=1, style="stdin")} == {"stdin"}

    @pytest.mark.parametrize("level", range(1, programs.LEVELS + 1))
    def test_no_constant_passes(self, level: int) -> None:
        for task in programs.tasks(60, seed=5, level=level):
            answers = [repr(test.get("expected", test.get("output"))) for test in task.reference["tests"]]
            assert len(set(answers)) > 1, task.prompt

    def test_levels_and_styles_are_checked(self) -> None:
        with pytest.raises(ValueError, match="level=7: expected a level from 1 to 6"):
            next(programs.tasks(1, seed=1, level=7))
        with pytest.raises(ValueError, match=r"settings\.style must be function, stdin or null"):
            next(programs.tasks(1, seed=1, style="cpp"))  # type: ignore[arg-type]
