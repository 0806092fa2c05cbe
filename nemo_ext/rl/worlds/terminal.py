"""Shell in the sandbox or in a container, for tasks in a terminal and in a repository, whose outcome a test checks.

Nemotron 3 Nano, section 3.1.2 (terminal use, software engineering). As in Mini-SWE-Agent, the only tool is a shell, and
each command has its own subshell. Containers are started by user-supplied commands (docker, podman, apptainer).
"""

import base64
import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from pydantic import Field

from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.sandbox.box import Run
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.sandbox.sessions import Sessions, error_of
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.tool_calls import check_style
from nemo_ext.rl.worlds import python_tool
from nemo_ext.rl.worlds.python_tool import PythonTool
from nemo_ext.rl.worlds.world import Tool

NAME = "terminal"
_MOST = 90_000
"""Maximum size of a script with files, in characters: Linux limits an argument to 128 kB."""
_SHELL = """\
import subprocess, sys
sys.stdout.flush()
status = subprocess.run(["bash", "-c", {command!r}], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    env={{"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": ".", "LC_ALL": "C.UTF-8"}}).returncode
if status:
    raise SystemExit(f"[exit status {{status}}]")
"""
_OUTPUT_BYTES = 1 << 20
_GRACE = 30.0
"""Seconds that a container's command may take beyond its limit, which the container itself enforces."""

Command = Annotated[str, Field(description="Command to execute", min_length=1, max_length=50_000)]


def bash(execute: Callable[[str], str], command: Command) -> str:
    """Execute a command with bash. Files persist between calls; the working directory and variables do not. Returns
    standard output and standard error, and the exit status if it is not 0."""
    return execute(command)


TOOL = Tool(bash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where a task takes place, and the test of its outcome.

    Attributes:
        test: command whose exit status is 0 if the task is solved; run after the last response.
        image: image of the container; unused in the sandbox.
        files: mapping from path to content, written before the first response.
        setup: command that is run after the files are written.
        test_files: mapping from path to content, written before the test; the model never sees them.
    """

    test: Annotated[str, Field(pattern=r"\S")]
    image: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    test_files: Mapping[str, str] = field(default_factory=dict)


def check(reference: Mapping[str, Any], *, needs_image: bool) -> Reference:
    """Parse a task's reference: {test, image, files: {path: content}, setup, test_files: {path: content}}.

    Raises:
        ValueError: the reference is invalid, its files are too large, or the image is missing.
    """
    parsed = checked(Reference, reference, where="reference", strict=True)
    for key, files in (("files", parsed.files), ("test_files", parsed.test_files)):
        if len(_writing(files)) > _MOST:
            raise ValueError(f"reference.{key}: more than 60 kB in all: put larger files into the image")
    if needs_image and not parsed.image:
        raise ValueError("reference.image is missing: container.start of environment terminal uses {image}")
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Commands of a container engine, as lists of arguments in which {name} and {image} are replaced.

    Exit status 125 means that the engine itself failed.

    Attributes:
        start: starts a container in the background.
        run: prefix of a command that is executed in the container.
        stop: stops and removes the container.
    """

    start: tuple[str, ...] = Field(min_length=1)
    run: tuple[str, ...] = Field(min_length=1)
    stop: tuple[str, ...] = Field(min_length=1)


class Shells(Sessions):
    """Shells in the sandbox: sessions whose calls are commands for bash instead of Python code."""

    def start(self, name: str, image: str) -> None:
        """Do nothing: the first call starts the session."""

    def call(self, name: str, before: Sequence[str], code: str) -> Run:
        """Execute a command; a nonzero exit status is reported as the error in the result's `value`."""
        run = super().call(name, [_SHELL.format(command=each) for each in before], _SHELL.format(command=code))
        if error := error_of(run):
            run = replace(run, value=_value(error.strip().rpartition("SystemExit: ")[2]))
        return run


class Containers:
    """Shells in containers, with the interface of `Shells`; a container is identified by its name alone.

    Args:
        container: commands of the container engine.
        seconds: time limit of a command in seconds.
    """

    def __init__(self, container: Container, seconds: float) -> None:
        self._container, self._seconds = container, seconds

    def start(self, name: str, image: str) -> None:
        """Start a container; raise SandboxError if that fails."""
        status, output = self._run(self._container.start, name, image=image, seconds=600)
        if status:
            raise SandboxError(
                f"container.start exited with status {status} ({_last(output)}): correct it or the image"
            )

    def call(self, name: str, before: Sequence[str], code: str) -> Run:
        """Execute a command in a container; raise SandboxError if the container itself fails."""
        limited = ["timeout", "-k", "1", f"{self._seconds:g}", "bash", "-c", code]
        status, output = self._run(self._container.run, name, *limited, seconds=self._seconds + _GRACE)
        if status == 125:
            raise SandboxError(f"container.run exited with status 125 ({_last(output)}): correct it")
        stopped = status in (124, 137) or status < 0
        error = f"[stopped after {self._seconds:g} s]" if stopped else f"[exit status {status}]" if status else ""
        measured = {"stderr": b"", "seconds": 0.0, "cpu_seconds": 0.0}
        return Run(ended="exit", status=status, stdout=output, value=_value(error), **measured)  # type: ignore[arg-type]

    def end(self, name: str) -> None:
        """Stop a container, whether or not it has been started."""
        with suppress(OSError):
            self._run(self._container.stop, name, seconds=_GRACE)

    def _run(self, command: Sequence[str], name: str, *more: str, image: str = "", seconds: float) -> tuple[int, bytes]:
        """Run a command and return its exit status and the start of its output; too much output ends the command."""
        names = {"{name}": f"nemo_ext_{name}", "{image}": image}
        words = [_replaced(word, names) for word in command]
        process = subprocess.Popen(
            [*words, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timer = threading.Timer(seconds, _kill, (process,))
        timer.start()
        try:
            assert process.stdout is not None
            output = process.stdout.read(_OUTPUT_BYTES)
            if len(output) == _OUTPUT_BYTES:
                _kill(process)
            return process.wait(), output
        finally:
            timer.cancel()
            process.stdout.close()  # type: ignore[union-attr]


@dataclass
class Conversation(python_tool.Conversation):
    """A task in a shell; see `nemo_ext.rl.environments.Conversation`. The shell starts at the first command."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end.atexit = isinstance(self.tool.sessions, Containers)  # unlike the sandbox, they outlive this process

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, super().__reduce__()[1]

    def verdict(self) -> Verdict:
        """Run the test, end the shell, and return `correct` if the test's exit status is 0."""
        shells, reference, why = cast(Any, self.tool.sessions), self.reference, ""
        try:
            if not self.failure:
                self._start()
                script = f"{_writing(reference.test_files)}\n(\n{reference.test}\n)"
                run = shells.call(self.name, self.executed, script)
                if (error := error_of(run)) != "":
                    why = f"the test failed: {_last(run.stdout)} {error or run}"
        except (SandboxError, OSError) as problem:
            self.failure = f"{type(problem).__name__}: {problem}"[:300]
        finally:
            shells.end(self.name)
        if self.failure:
            return Verdict.error(self.failure)
        return self._counted(Verdict.wrong(why) if why else Verdict.correct())

    def _execute(self, code: str) -> str:
        self._start()
        return super()._execute(code)

    def _start(self) -> None:
        if self.executed:
            return
        shells, script = (
            cast(Any, self.tool.sessions),
            f"set -e\n{_writing(self.reference.files)}\n{self.reference.setup}",
        )
        shells.start(self.name, self.reference.image)
        run = shells.call(self.name, (), script)
        if (error := error_of(run)) != "":
            raise SandboxError(f"reference.files or reference.setup failed: {_last(run.stdout)} {error or run}")
        self.executed.append(script)


def environment(
    *,
    container: Mapping[str, Any] | None = None,
    max_calls: int = 50,
    max_turns: int | None = None,
    seconds: float = 60.0,
    characters: int = 8000,
    limits: Mapping[str, Any] | None = None,
    style: python_tool.Style = "any",
    sessions: int = 64,
    idle_seconds: float = 3600.0,
    concurrency: int | None = None,
    isolation: str = "auto",
    strict: bool = False,
) -> Environment:
    """Create the environment `terminal`, for tasks that the model solves in a shell.

    Args:
        container: commands of a container engine (`Container`); None for shells in the sandbox.
        max_calls: maximum number of commands per conversation.
        max_turns: maximum number of responses per conversation; None allows one more than `max_calls`.
        seconds: time limit of a command and of the test in seconds.
        characters: maximum length of a command's output; the middle of a longer one is omitted.
        limits: changes to the sandbox's `nemo_ext.rl.sandbox.limits.Limits`, except its times.
        style: format of tool calls in raw text; see `nemo_ext.chat.tool_calls`.
        sessions, idle_seconds, concurrency, isolation, strict: see `nemo_ext.rl.worlds.python_tool.environment`.

    Raises:
        ValueError: a setting is invalid.
        SandboxError: `strict` is set and namespaces are not available.
    """
    key = json.dumps({name: value for name, value in sorted(locals().items()) if value is not None}, default=dict)
    check_style(style)
    checked_whole("max_calls", max_calls, least=1)
    checked_whole("characters", characters, least=100)
    turns = max_calls + 1 if max_turns is None else checked_whole("max_turns", max_turns, least=2)
    for name in ("wall_seconds", "cpu_seconds"):
        if name in (limits or {}):
            raise ValueError(f"limits.{name} is not used: set seconds, the time limit of a command")
    times = {"wall_seconds": seconds, "cpu_seconds": seconds}
    applied = Limits(processes=64, output_bytes=_OUTPUT_BYTES).changed({**(limits or {}), **times})
    needs_image = False
    shells: Any
    if container is not None:
        commands = checked(Container, container, where="container")
        needs_image = any("{image}" in word for word in commands.start)
        shells = Containers(commands, seconds)
    else:
        sandbox = Sandbox(limits=applied, concurrency=concurrency, isolation=cast(Any, isolation), strict=strict)
        shells = Shells(sandbox, most=sessions, idle_seconds=idle_seconds)
    tool = PythonTool(
        settings=key,
        verify=None,
        sessions=shells,
        limits=applied,
        max_calls=max_calls,
        max_turns=turns,
        characters=characters,
        style=style,
        function=TOOL,
    )
    _TOOLS[key] = tool
    return Environment(
        name=NAME,
        check=lambda reference: check(reference, needs_image=needs_image),
        begin=lambda reference: Conversation(tool, reference),
        max_turns=turns,
        tools=(TOOL.schema,),
    )


# By settings, for conversations that were pickled in a different process.
_TOOLS: dict[str, PythonTool] = {}


def _restore(settings: str, reference: Any, state: tuple[Any, ...]) -> Conversation:
    if settings not in _TOOLS:
        make(NAME, json.loads(settings))
    return Conversation(_TOOLS[settings], reference, *state)


def _writing(files: Mapping[str, str]) -> str:
    """Return shell commands that write files, given as a mapping from path to content."""
    return "\n".join(
        f"mkdir -p {shlex.quote(os.path.dirname(path) or '.')} && "
        f"base64 -d <<< '{base64.b64encode(content.encode()).decode()}' > {shlex.quote(path)}"
        for path, content in files.items()
    )


def _value(error: str) -> bytes:
    return json.dumps({"error": error}).encode()


def _last(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-200:]


def _replaced(word: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(name, value)
    return word


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
