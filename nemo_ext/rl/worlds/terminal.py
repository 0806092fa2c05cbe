"""Shell in the sandbox, for tasks in a terminal and in a repository, whose outcome is checked after the last response.

Nemotron 3 Nano, section 3.1.2 (terminal use, software engineering). As in Mini-SWE-Agent, the only tool is a shell, and
each command has its own subshell.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.sandbox.box import Run
from nemo_ext.rl.sandbox.files import WRITE, Files
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
_SCRIPT_BYTES = 120_000
"""Maximum size of a script: Linux limits an argument to 128 kB."""
_SHELL = """\
import subprocess, sys
sys.stdout.flush()
status = subprocess.run(["bash", "-c", {command!r}], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    env={{"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": {home!r}, "LC_ALL": "C.UTF-8"}}).returncode
if status:
    raise SystemExit(f"[exit status {{status}}]")
"""
_READ = """\
import json
found = {{}}
for path in {paths!r}:
    try:
        with open(path, "rb") as file:
            found[path] = file.read({most}).decode(errors="replace")
    except OSError:
        pass
print(json.dumps(found))
"""
_ANSWER_BYTES = 100_000
_OUTPUT_BYTES = 1 << 20

Command = Annotated[str, Field(description="Command to execute", min_length=1, max_length=50_000)]


def bash(execute: Callable[[str], str], command: Command) -> str:
    """Execute a command with bash. Files persist between calls; the working directory and variables do not. Returns
    standard output and standard error, and the exit status if it is not 0."""
    return execute(command)


TOOL = Tool(bash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Files of a task, and the test of its outcome: `test`, `answers`, or both.

    Attributes:
        test: command whose exit status is 0 if the task is solved; run after the last response.
        answers: mapping from path to expected content, compared outside the sandbox without case and extra white space.
        files: mapping from path to content, written before the first response.
        setup: command that is run after the files are written.
        test_files: mapping from path to content, written before the test; the model never sees them.
    """

    test: str = ""
    answers: Files = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    setup: str = ""
    test_files: Files = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.test.strip() and not self.answers:
            raise ValueError("test and answers are empty: set one of them")
        for path, expected in self.answers.items():
            if not expected.strip() or len(expected.encode()) > _ANSWER_BYTES // len(self.answers):
                raise ValueError(f"answers.{path} is empty or too large (100 kB in all): correct it, or use a test")
        for name, script in (("test", self.test), ("setup", self.setup)):
            if "\0" in script or len(script.encode()) > _SCRIPT_BYTES:
                raise ValueError(f"{name} has a null character or more than 120 kB: correct it, or move it to a file")


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a task's reference, a mapping with the attributes of `Reference`; raise ValueError if it is invalid."""
    return checked(Reference, reference, where="reference", strict=True)


class Shells(Sessions):
    """Sessions in which the error in a result's `value`, such as the exit status of `_SHELL`, has no traceback."""

    def call(self, name: str, before: Sequence[str], code: str, *, fresh: bool = False) -> Run:
        """Execute code as `Sessions.call` does, and keep the last line of an error."""
        run = super().call(name, before, code, fresh=fresh)
        if error := error_of(run):
            last = error.strip().rpartition("\n")[2].removeprefix("SystemExit: ")
            run = replace(run, value=json.dumps({"error": last}).encode())
        return run


@dataclass
class Conversation(python_tool.Conversation):
    """A task in a shell; see `nemo_ext.rl.environments.Conversation`. The shell starts at the first command."""

    def verdict(self) -> Verdict:
        """Check the outcome and end the shell. The model's processes are ended first, and its files replaced."""
        why = ""
        try:
            if not self.failure:
                self._start()
                why = self._difference() or self._failed_test()
        except (SandboxError, OSError) as problem:
            self.failure = f"{type(problem).__name__}: {problem}"[:300]
        finally:
            self.tool.sessions.end(self.name)
        if self.failure:
            return Verdict.error(self.failure)
        return self._counted(Verdict.wrong(why) if why else Verdict.correct())

    def _difference(self) -> str:
        """Return the path of a file that differs from the expected answer, in a sentence, or ""."""
        if not (expected := self.reference.answers):
            return ""
        code = _READ.format(paths=list(expected), most=_ANSWER_BYTES // len(expected))
        run = self._checked(code)
        try:
            found = json.loads(run.stdout) if error_of(run) == "" else {}
        except ValueError:
            found = {}
        for path, text in expected.items():
            if found.get(path, "").casefold().split() != text.casefold().split():
                return f"{path} is not the expected answer" if path in found else f"{path} cannot be read"
        return ""

    def _failed_test(self) -> str:
        """Return why the test failed, or ""."""
        if not self.reference.test:
            return ""
        # Not the model's folder as HOME: programs execute files there when they start.
        run = self._checked(_code(self.reference.test_files, self.reference.test, home="/"))
        return "" if (error := error_of(run)) == "" else f"the test failed: {_last(run.stdout)} {error or run}"

    def _checked(self, code: str) -> Run:
        run = self.tool.sessions.call(self.name, self.executed, code, fresh=True)
        if error_of(run) is not None:
            self.executed.append(code)
        return run

    def _execute(self, code: str) -> str:
        self._start()
        return super()._execute(_code({}, code))

    def _start(self) -> None:
        if self.executed:
            return
        code = _code(self.reference.files, self.reference.setup)
        run = self.tool.sessions.call(self.name, (), code)
        if (error := error_of(run)) != "":
            raise SandboxError(
                f"reference.files or reference.setup failed ({_last(run.stdout)} {error or run}): correct them in the "
                "task"
            )
        self.executed.append(code)


def environment(
    *,
    max_calls: int = 50,
    max_turns: int | None = None,
    seconds: float = 60.0,
    characters: int = 8000,
    limits: Mapping[str, Any] | None = None,
    style: python_tool.Style = "any",
    sessions: int = 64,
    idle_seconds: float = 3600.0,
    concurrency: int | None = None,
) -> Environment:
    """Create the environment `terminal`, for tasks that the model solves in a shell.

    Args:
        max_calls: maximum number of commands per conversation.
        max_turns: maximum number of responses per conversation; None allows one more than `max_calls`.
        seconds: time limit of a command and of the test in seconds.
        characters: maximum length of a command's output; the middle of a longer one is omitted.
        limits: changes to the sandbox's `nemo_ext.rl.sandbox.limits.Limits`, except its times.
        style: format of tool calls in raw text; see `nemo_ext.chat.tool_calls`.
        sessions, idle_seconds, concurrency: see `nemo_ext.rl.worlds.python_tool.environment`.

    Raises:
        ValueError: a setting is invalid.
        SandboxError: namespaces are not available, without which no process can be started.
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
    sandbox = Sandbox(limits=applied, concurrency=concurrency, strict=True)
    tool = PythonTool(
        environment=NAME,
        settings=key,
        verify=None,
        sessions=Shells(sandbox, most=sessions, idle_seconds=idle_seconds),
        limits=applied,
        max_calls=max_calls,
        max_turns=turns,
        characters=characters,
        style=style,
        function=TOOL,
    )
    python_tool.share(tool)
    return Environment(
        name=NAME,
        check=check,
        begin=lambda reference: Conversation(tool, reference),
        max_turns=turns,
        tools=(TOOL.schema,),
    )


def _code(files: Mapping[str, str], command: str, *, home: str = ".") -> str:
    """Return code for a session that writes files, replacing those at the paths, and then executes a command."""
    writing = f"{WRITE}write({dict(files)!r})\n" if files else ""
    return writing + _SHELL.format(command=command, home=home)


def _last(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-200:]
