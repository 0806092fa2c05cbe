"""Steps of the program's own process before and after it is the program.

Python programs do not start an interpreter: they run in a fork of an existing one. They return bytes, which the host
compares or reads as JSON.
"""

import builtins
import contextlib
import json
import marshal
import os
import signal
import sys
import traceback
import types
from typing import Any, NoReturn

from nemo_ext.rl.sandbox.inside.plain import needed, plain

TURN_BYTES = 8
VALUE, TALK = 3, 4
"""Descriptor that a function's result is written to, and descriptor over which turns are taken.

What a program itself writes to them counts as its result, or as the end of its turn: it gains nothing that printing or
returning would not give it."""


COMPILED, FAILED, NOT_PLAIN = range(3)
"""Statuses of the first turn. With the last, `VALUE` has the compiled program, and each run needs a process."""


def run_python(code: bytes, function: str | None) -> NoReturn:
    """Run as the program once. Streams are descriptors 0 to 2; with `function`, 0 has a call and `VALUE` its result.

    Args:
        code: compiled program, from `serve_python`.
    """
    _leave(_run(marshal.loads(code), function))


def serve_python(stdin: int, source: bytes, prelude: str, function: str | None) -> NoReturn:
    """Run as the program, in a fresh module, for each mark received over `TALK`; send the mark back with the status.

    The first turn compiles. A program that is not plain is compiled only.

    Args:
        stdin: descriptor that becomes 0 in each turn; the supervisor fills it anew.
    """
    taken, leave, saved = os.read, os._exit, [(os.dup(number), number) for number in (1, 2, VALUE, TALK)]
    talk = saved[-1][0]
    mark = taken(talk, TURN_BYTES)
    codes = _compiled(source, prelude)
    status = FAILED if codes is None else COMPILED if _is_plain(source, prelude) else NOT_PLAIN
    if status == NOT_PLAIN:
        _write(VALUE, marshal.dumps(codes))
    while mark and _flushed():
        _write(talk, mark + bytes([status]))
        mark = taken(talk, TURN_BYTES)
        if codes is None or status == NOT_PLAIN or not mark:
            break
        for kept, number in ((stdin, 0), *saved):
            os.dup2(kept, number)
        status = _run(codes, function)
    # As the interpreter does if its output is gone.
    leave(status or 120)


def _compiled(source: bytes, prelude: str) -> list[types.CodeType] | None:
    """Code of the prelude and the program; None, and the error on stderr, if it does not compile."""
    sys.set_int_max_str_digits(50_000)
    _standard_streams()
    try:
        with contextlib.suppress(RecursionError, MemoryError):
            prelude = needed(prelude, source)
        # The prelude is code of its own, so that the program's line numbers and __future__ imports stand.
        return [compile(text, "main.py", "exec", dont_inherit=True) for text in (prelude, source)]
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return None


def _is_plain(source: bytes, prelude: str) -> bool:
    try:
        return plain(source, needed(prelude, source))
    except (RecursionError, MemoryError):
        return False


def _run(codes: list[types.CodeType], function: str | None) -> int:
    """Run the program once; returns the exit status."""
    _standard_streams()
    sys.argv = ["main.py"]
    # The module `site` defines these elsewhere; it is left out here.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.set_int_max_str_digits(50_000)
    sys.setrecursionlimit(50_000)
    # A script's last lines, `if __name__ == "__main__"`, are not what is asked for where a function is.
    main = types.ModuleType("__main__" if function is None else "solution")
    main.__dict__["__builtins__"] = builtins
    sys.modules[main.__name__] = main
    encode, write = json.dumps, _write
    status = 0
    try:
        call = json.loads(sys.stdin.read()) if function is not None else None
        for code in codes:
            exec(code, main.__dict__)
        if function is not None and call is not None:
            value = _named(main, function)(*call["args"], **call["kwargs"])
            write(VALUE, encode(value, default=_plain).encode())
    except SystemExit as left:
        status = _status(left)
    except BaseException:
        traceback.print_exc(limit=-5)
        status = 1
    for name, last in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        if name in sys.modules:
            getattr(sys.modules[name], last)()
    return status


def run_file(executable: int, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by the executable of an open file."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(executable, arguments, environment)


def run_path(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by the executable at a path."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(arguments[0], arguments, environment)


def _named(main: types.ModuleType, function: str) -> Any:
    """Function of the module, or method of its class Solution."""
    if hasattr(main, function):
        return getattr(main, function)
    solution = getattr(main, "Solution", None)
    if solution is not None and hasattr(solution, function):
        return getattr(solution(), function)
    raise NameError(f"there is no function {function!r}")


def _plain(value: Any) -> Any:
    """JSON form of numbers and arrays of libraries, and of sequences that JSON does not know."""
    for name in ("tolist", "item"):
        if hasattr(value, name):
            return getattr(value, name)()
    if type(value).__name__ in ("deque", "range", "array"):
        return list(value)
    raise TypeError(f"a result of type {type(value).__name__} cannot be written as JSON")


def _standard_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if number == 0 else "w"
        errors = "surrogateescape" if number < 2 else "backslashreplace"
        stream = os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _status(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return (left.code or 0) & 0xFF
    print(left.code, file=sys.stderr)
    return 1


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _flushed() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        return True
    except BaseException:
        return False


def _leave(status: int) -> NoReturn:
    try:
        # As the interpreter does if its output is gone.
        status = status if _flushed() else status or 120
    finally:
        os._exit(status)
