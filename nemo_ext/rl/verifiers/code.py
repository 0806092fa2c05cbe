"""Verifies programs by running them on tests, each answer in its own sandbox and each test in its own process.

    {language: python | cpp, style: stdin, tests: [{input: "1 2\\n", output: "3\\n", tolerance?: 1e-6}], limits?: {...}}
    {language: python, style: function, function: name, tests: [{args: [...], kwargs?: {...}, expected: ...}]}
    {language: python, style: asserts, tests: ["assert f(1) == 2", ...]}

An answer's program is its last fenced block in the language, or its last block without a language. All tests must pass.
Expected outputs stay in this process: a program receives only inputs, and its output is compared here, so it cannot
pass by tampering with its own interpreter or reading its memory. A function's result is returned as JSON. Asserts, as
in HumanEval and MBPP, run in the program's own process, which could tamper with them, so use them for evaluation but
not for rewards.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal, cast

from pydantic import Field, StrictStr

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.rl.answers import fences
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.sandbox.box import Box, Run
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.verdict import Verdict

MAX_TESTS = 50
"""Maximum number of tests, as in Nemotron 3 Nano (section 3.2, competition code)."""

TAGS = {"python": {"python", "py", "python3"}, "cpp": {"cpp", "c++", "cc", "cxx"}}
_MOST_CODE = 1 << 18
_ASSERTS = "nemo_ext_asserts"
_ASSERTS_CODE = f"\n\ndef {_ASSERTS}(test, run=exec):\n    run(test, globals())\n    return True\n"
_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test of a program or function.

    Attributes:
        input: standard input, or the call's arguments as JSON.
        expected: expected standard output, or the expected result as a JSON value.
        tolerance: absolute and relative tolerance for numbers; if None, they are compared exactly.
    """

    __test__ = False

    input: bytes
    expected: Any
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Tests that a program must pass.

    Attributes:
        language: python or cpp.
        function: name of the function to call; None for programs that read standard input.
        asserts: whether the tests are statements that run after the program.
        limits: changes to the sandbox's limits, which apply to each test.
    """

    language: Literal["python", "cpp"]
    function: str | None
    tests: tuple[Test, ...]
    asserts: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _RawReference:
    """Reference as written in a task."""

    language: Literal["python", "cpp"]
    style: Literal["stdin", "function", "asserts"]
    tests: Annotated[list[Any], Field(min_length=1)]
    function: StrictStr | None = None
    limits: dict[str, Any] | None = None


Tolerance = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """Test of a program that reads standard input, as written in a task."""

    input: StrictStr
    output: StrictStr
    tolerance: Tolerance | None = None

    def __post_init__(self) -> None:
        (self.input + self.output).encode()  # raises on lone surrogates

    def test(self) -> Test:
        return Test(input=self.input.encode(), expected=self.output.encode(), tolerance=self.tolerance)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Test of a function, as written in a task."""

    expected: Any
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    tolerance: Tolerance | None = None

    def __post_init__(self) -> None:
        try:
            json.dumps([self.args, self.kwargs, self.expected], allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"args, kwargs and expected must be JSON values: {error}") from None

    def test(self) -> Test:
        # Results are compared in JSON form, where tuples are lists, for example.
        expected = json.loads(json.dumps(self.expected))
        call = json.dumps({"args": self.args, "kwargs": self.kwargs}).encode()
        return Test(input=call, expected=expected, tolerance=self.tolerance)


def check(reference: Mapping[str, Any], *, max_tests: int = MAX_TESTS) -> Reference:
    """Parse a task's reference, which may have at most `max_tests` tests.

    Raises:
        ValueError: the reference is invalid; the message names the key and the accepted values.
    """
    raw = checked(_RawReference, reference, where="reference")  # not as JSON: tests may be long
    if raw.style == "function":
        if raw.language != "python":
            raise ValueError(f"reference.language must be python for style function, not {raw.language!r}")
        if not (raw.function or "").isidentifier():
            raise ValueError(f"reference.function must be the name of the function to test, not {raw.function!r}")
    elif raw.function is not None:
        raise ValueError(
            f"reference.function={raw.function!r} applies only to style function, not to style {raw.style}: remove it"
        )
    elif raw.style == "asserts" and raw.language != "python":
        raise ValueError(f"reference.language must be python for style asserts, not {raw.language!r}")
    if len(raw.tests) > max_tests:
        raise ValueError(
            f"reference.tests has {len(raw.tests)} tests, more than max_tests ({max_tests}): remove some, or raise "
            "the environment's max_tests"
        )
    limits = raw.limits or {}
    Limits().changed(limits, "reference.limits")
    if raw.style == "asserts":
        tests = []
        for index, test in enumerate(raw.tests):
            if not isinstance(test, str) or not test.strip():
                raise ValueError(f"reference.tests[{index}] must be a string of Python statements, not {test!r:.80}")
            tests.append(Test(input=json.dumps({"args": [test], "kwargs": {}}).encode(), expected=True))
        return Reference(language="python", function=_ASSERTS, tests=tuple(tests), asserts=True, limits=limits)
    kind: type[_Call | _Lines] = _Call if raw.style == "function" else _Lines
    tests = [checked(kind, test, f"reference.tests[{index}]").test() for index, test in enumerate(raw.tests)]
    return Reference(language=raw.language, function=raw.function, tests=tuple(tests), limits=limits)


def verify(response: Response, reference: Reference, *, sandbox: Sandbox, partial: bool = False) -> Verdict:
    """Run the answer's program on the tests, blocking this thread.

    Args:
        response: response whose answer contains the program.
        partial: score wrong answers by the share of tests that pass, for which all tests are run; otherwise testing
            stops at the first failure.
    """
    source = program(response.answer, TAGS[reference.language])
    if source is None:
        return _no_program(response.answer, reference.language)
    try:
        return sandbox.session(lambda box: run_tests(box, source, reference, limits=sandbox.limits, partial=partial))
    except SandboxError as error:
        return Verdict.error(str(error), source)


async def verify_async(response: Response, reference: Reference, *, sandbox: Sandbox, partial: bool = False) -> Verdict:
    """Asynchronous version of `verify`; calls beyond the sandbox's concurrency wait."""
    source = program(response.answer, TAGS[reference.language])
    if source is None:
        return _no_program(response.answer, reference.language)
    try:
        return await sandbox.session_async(
            lambda box: run_tests(box, source, reference, limits=sandbox.limits, partial=partial)
        )
    except SandboxError as error:
        return Verdict.error(str(error), source)


def environment(
    *,
    max_tests: int = MAX_TESTS,
    partial: bool = False,
    limits: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
    queue_seconds: float | None = None,
    isolation: str = "auto",
    strict: bool = False,
) -> Environment:
    """Create the environment `code`, which runs programs on tests in its own sandbox.

    Args:
        max_tests: maximum number of tests; a reference with more is rejected.
        partial: whether wrong answers are scored by the share of tests that pass.
        limits: changes to `nemo_ext.rl.sandbox.limits.Limits`; a reference's own limits take precedence.
        concurrency, queue_seconds, isolation, strict: see `nemo_ext.rl.sandbox.sandbox.Sandbox`.

    Raises:
        ValueError: a setting is invalid.
        SandboxError: `strict` is set and namespaces are not available.
    """
    checked_whole("max_tests", max_tests, least=1)
    sandbox = Sandbox(
        limits=Limits().changed(limits or {}),
        concurrency=concurrency,
        queue_seconds=queue_seconds,
        isolation=cast(Any, isolation),
        strict=strict,
    )
    return Environment(
        name="code",
        check=functools.partial(check, max_tests=max_tests),
        verify=functools.partial(verify_async, sandbox=sandbox, partial=partial),
        waits=True,
    )


def program(answer: str, tags: Collection[str]) -> str | None:
    """Return the answer's last fenced block with one of the tags, else its last block without a tag, else None.

    Models also show inputs and outputs in fenced blocks, so the very last block need not be the program.
    """
    named = unnamed = None
    for tag, inner, _, _ in fences(answer):
        if tag in tags:
            named = inner
        elif not tag:
            unnamed = inner
    return named if named is not None else unnamed


def run_tests(box: Box, source: str, reference: Reference, *, limits: Limits, partial: bool = False) -> Verdict:
    """Run a program on the tests in a box.

    Args:
        limits: limits of each run, before the reference's changes.
        partial: score wrong programs by the share of tests that pass; otherwise stop at the first failure.

    Raises:
        SandboxError: the sandbox failed.
    """
    if len(source) > _MOST_CODE:
        return Verdict.wrong(f"the program has {len(source)} characters, more than {_MOST_CODE}")
    applied = limits.changed(reference.limits)
    if reference.language == "cpp":
        compiled = box.compile_cpp(source)
    else:
        whole = source + _ASSERTS_CODE if reference.asserts else source
        compiled = box.compile_python(whole, applied, function=reference.function)
    if not compiled.ok:
        return Verdict.wrong(f"does not compile: {_describe(compiled)}", source)
    tests, passed, reason = reference.tests, 0, ""
    test_limits = [_limits(test, applied) for test in tests]
    runs = box.runs([test.input for test in tests], test_limits)
    with contextlib.closing(runs):
        for index, (test, run) in enumerate(zip(tests, runs, strict=True)):
            failure = _failure(run, test, reference.function)
            passed += not failure
            if failure:
                reason = reason or f"test {index}: {failure}"
                if not partial:
                    break
    if passed == len(tests):
        return Verdict.correct(source)
    return Verdict.wrong(reason, source, score=passed / len(tests) if partial else 0.0)


def _limits(test: Test, limits: Limits) -> Limits:
    """Return the limits with `output_bytes` reduced, so that output much longer than expected ends the run."""
    expected = test.expected if isinstance(test.expected, bytes) else json.dumps(test.expected)
    return replace(limits, output_bytes=min(limits.output_bytes, 4 * len(expected) + (1 << 16)))


def _failure(run: Run, test: Test, function: str | None) -> str:
    """Return why a run fails the test, or "" if it passes.

    If `function` is None, standard output is compared, otherwise the function's result.
    """
    if not run.ok:
        return _describe(run)
    if function is None:
        same = same_output(run.stdout, test.expected, test.tolerance)
        return "" if same else "the output differs from the expected output"
    try:
        same = same_value(json.loads(run.value), test.expected, test.tolerance)
    except (ValueError, RecursionError):
        return "the result is not valid JSON"
    return "" if same else "the result differs from the expected result"


def same_output(output: bytes, expected: bytes, tolerance: float | None = None) -> bool:
    """Return whether two outputs have the same words on the same lines, ignoring other white space.

    If a line consists only of numbers, they are compared by value (1.50 equals 1.5), as in NeMo Gym's verifier.
    If there is a `tolerance`, numbers on any line may differ by it, in absolute or relative terms.
    """
    actual, lines = output.strip().split(b"\n"), expected.strip().split(b"\n")
    return len(actual) == len(lines) and all(
        _same_line(line, target, tolerance) for line, target in zip(actual, lines, strict=True)
    )


def _same_line(line: bytes, expected: bytes, tolerance: float | None) -> bool:
    mine, wanted = line.split(), expected.split()
    if mine == wanted:
        return True
    if len(mine) != len(wanted):
        return False
    if tolerance is not None:
        return all(one == other or _near(one, other, tolerance) for one, other in zip(mine, wanted, strict=True))
    if not all(_NUMBER.fullmatch(word) for word in (*mine, *wanted)):
        return False
    try:
        return [Decimal(word.decode()) for word in mine] == [Decimal(word.decode()) for word in wanted]
    except InvalidOperation:
        return False


def _near(word: bytes, expected: bytes, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    return math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance)


def same_value(value: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return whether two JSON values are equal: as in Python, 1 equals 1.0 and true, and NaN equals nothing.

    If there is a `tolerance`, numbers may differ by it, in absolute or relative terms.

    Raises:
        RecursionError: the values are nested too deeply.
    """
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(same_value(one, other, tolerance) for one, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], expected[key], tolerance) for key in expected)
        )
    if tolerance is not None and isinstance(expected, int | float) and isinstance(value, int | float):
        try:
            return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            return False
    return bool(value == expected)


def _no_program(answer: str, language: str) -> Verdict:
    reason = f"the answer has no fenced {language} block" if answer else "the answer is empty"
    return Verdict.wrong(reason)


def _describe(run: Run) -> str:
    """Return how a run ended and its last line of stderr, for a verdict's reason."""
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    return f"{run}: {lines[-1][:200]}" if lines else str(run)
