"""Code that runs in the program's process before and after the program itself.

Python programs do not start an interpreter but run in a fork of an existing one. Results are bytes, which the host
compares or parses as JSON.
"""

import ast
import builtins
import contextlib
import io
import json
import linecache
import marshal
import os
import signal
import symtable
import sys
import traceback
import types
from typing import Any, NoReturn

VALUE = 3
"""Descriptor for a function's result, or for the compiled program.

A program that writes to it directly gains nothing that it could not get by returning a value."""
_TRACEBACK = 16_384


def compile_python(source: bytes, prelude: str) -> NoReturn:
    """Compile the prelude's necessary imports and the program, write the code to descriptor `VALUE`, and exit.

    If this fails, the exit status is 1 and the error is on stderr.
    """
    sys.set_int_max_str_digits(50_000)
    _standard_streams()
    try:
        with contextlib.suppress(RecursionError, MemoryError):
            prelude = _needed(prelude, source)
        # The prelude is compiled separately, so that the program's line numbers and __future__ imports stay valid.
        codes = [compile(text, "main.py", "exec", dont_inherit=True) for text in (prelude, source)]
        code = marshal.dumps(codes)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _leave(1)
    _write(VALUE, code)
    _leave(0)


def run_python(code: bytes, function: str | None) -> NoReturn:
    """Become the program and run it; the standard streams are descriptors 0 to 2.

    Args:
        code: compiled program, from `compile_python`.
        function: name of the function to call, whose arguments are read from descriptor 0 and whose result is written
            to `VALUE`; None to run the program itself.
    """
    _leave(_run(marshal.loads(code), function))


def run_calls(wake: int) -> NoReturn:
    """Execute pieces of code in one namespace, as a notebook does.

    For every byte from the descriptor `wake`, the code is read from descriptor 0, and {"error": traceback, or ""} is
    written to `VALUE` as a line of JSON. Standard error goes to standard output.
    """
    main = _become_main("__main__")
    number, encode, write, process = 0, json.dumps, _write, os.getpid()
    while os.read(wake, 1):
        number += 1
        _standard_streams()
        sys.stderr, sys.stdin = sys.stdout, io.StringIO()
        source = os.pread(0, os.fstat(0).st_size, 0).decode()
        error = _executed(source, main.__dict__, f"<call {number}>")
        _flush()
        if os.getpid() != process:  # a fork that the code made
            os._exit(0)
        write(VALUE, encode({"error": error}).encode() + b"\n")
    os._exit(0)


def _executed(source: str, namespace: dict[str, Any], name: str) -> str:
    """Execute code and print the value of its last expression; return the traceback, or "" if there is none."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        trace = error.__traceback__
        while trace and not trace.tb_frame.f_code.co_filename.startswith("<call"):
            trace = trace.tb_next  # not the code's own frame
        return "".join(traceback.format_exception(type(error), error, trace, limit=-5))[-_TRACEBACK:]
    return ""


def _needed(prelude: str, source: bytes) -> str:
    """Return the lines of the prelude that import a name used in the source; raises the errors of `symtable`."""
    if not prelude:
        return ""
    tables = [symtable.symtable(source, "main.py", "exec")]  # type: ignore[arg-type]
    used = {symbol.get_name() for symbol in tables[0].get_symbols()}
    while tables:
        below = tables.pop().get_children()
        used |= {symbol.get_name() for table in below for symbol in table.get_symbols() if symbol.is_global()}
        tables += below
    return "\n".join(line for line in prelude.splitlines() if line.split()[-1] in used)


def _run(codes: list[types.CodeType], function: str | None) -> int:
    """Run the compiled prelude and program, then call `function` if there is one; return the exit status."""
    # If a function is called, a script's `if __name__ == "__main__"` must not run.
    main = _become_main("__main__" if function is None else "solution")
    sys.setrecursionlimit(50_000)
    encode, write = json.dumps, _write
    status = 0
    try:
        call = json.loads(sys.stdin.read()) if function is not None else None
        for code in codes:
            exec(code, main.__dict__)
        if function is not None and call is not None:
            value = _find_function(main, function)(*call["args"], **call["kwargs"])
            write(VALUE, encode(value, default=_plain).encode())
    except SystemExit as error:
        status = _status(error)
    except BaseException:
        traceback.print_exc(limit=-5)
        status = 1
    for name, last in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        if name in sys.modules:
            getattr(sys.modules[name], last)()
    return status


def _become_main(name: str) -> types.ModuleType:
    """Set up the interpreter for a program, and return the program's module."""
    _standard_streams()
    sys.argv = ["main.py"]
    # Elsewhere the module `site` defines these; it is not loaded here.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.set_int_max_str_digits(50_000)
    main = types.ModuleType(name)
    main.__dict__["__builtins__"] = builtins
    sys.modules[name] = main
    return main


def run_executable(executable: int | str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process with an executable, given by its path or a descriptor; `arguments` start with its name."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(executable, arguments, environment)


def _find_function(main: types.ModuleType, function: str) -> Any:
    """Return the module's function, or the method of its class Solution, with this name."""
    if hasattr(main, function):
        return getattr(main, function)
    solution = getattr(main, "Solution", None)
    if solution is not None and hasattr(solution, function):
        return getattr(solution(), function)
    raise NameError(f"the program defines no function named {function!r}")


def _plain(value: Any) -> Any:
    """Convert libraries' numbers and arrays, and sequences that JSON does not support, into JSON values."""
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


def _status(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _flush() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        return True
    except BaseException:
        return False


def _leave(status: int) -> NoReturn:
    try:
        # The status with which the interpreter exits if it cannot flush its output.
        status = status if _flush() else status or 120
    finally:
        os._exit(status)
