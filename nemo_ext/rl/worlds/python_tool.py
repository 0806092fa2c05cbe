"""Python as a tool within the response to a task that another environment verifies (tool-integrated reasoning).

Nemotron 3 Nano, sections 3.1.2 and 3.4: solutions with Python as a tool, and benchmarks "with tools". Name and argument
are as in NeMo-Skills' stateful Python tool, with which the paper evaluates, and NeMo Gym's ns_tools.
"""

import inspect
import json
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from pydantic import Field

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.chat.tool_calls import ParsedCalls, Style, calls_of
from nemo_ext.job.settings import checked_whole
from nemo_ext.rl.environments import Environment, make, settings_of
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.sandbox.limits import Limits
from nemo_ext.rl.sandbox.sandbox import Sandbox
from nemo_ext.rl.sandbox.sessions import Sessions, error_of
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.tool_calls import check_style
from nemo_ext.rl.worlds.world import Tool, ToolError

NAME = "python_tool"
Code = Annotated[str, Field(description="Code to execute", min_length=1, max_length=100_000)]


def stateful_python_code_exec(execute: Callable[[str], str], code: Code) -> str:
    """Execute Python code in a stateful session, as in a notebook: variables persist between calls. Returns what the
    code prints, the value of its last expression, and the traceback of an error. There is no network."""
    return execute(code)


TOOL = Tool(stateful_python_code_exec)
_LAST_CALL = "[no calls are left: give the final answer]"


@dataclass(frozen=True, kw_only=True)
class PythonTool:
    """Python tool with its limits, and verifier of final responses; shared by all conversations of an environment.

    Attributes:
        environment: name of the environment.
        settings: its settings as JSON, from which an unpickled conversation restores the tool.
        verify: function that verifies the last response, from which calls are removed; None if the verdict depends on
            the session.
        limits: limits of each call.
        characters: maximum length of a call's output.
    """

    environment: str
    settings: str
    verify: Callable[[Response, Any], Verdict | Awaitable[Verdict]] | None
    sessions: Sessions
    limits: Limits
    max_calls: int
    max_turns: int
    characters: int
    style: Style
    function: Tool = TOOL


@dataclass
class Conversation:
    """Conversation in which the model may call the Python tool; see `nemo_ext.rl.environments.Conversation`.

    Attributes:
        name: name of the Python session.
        turns: number of responses so far.
        calls: number of calls so far.
        failed: number of calls that raised an error, exceeded a limit or could not be parsed.
        executed: code of the calls that the state of the session depends on.
        last: the last response, without its reasoning and calls.
        failure: error of the sandbox, which is not the model's fault; "" if there was none.
    """

    tool: PythonTool
    reference: Any
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    turns: int = 0
    calls: int = 0
    failed: int = 0
    executed: list[str] = field(default_factory=list)
    last: Response = field(default_factory=lambda: Response(text=""))
    failure: str = ""

    def __post_init__(self) -> None:
        # The session ends with this object, even if the conversation is abandoned.
        self._end = weakref.finalize(self, self.tool.sessions.end, self.name)
        self._end.atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._end.detach()  # the session belongs to the unpickled object
        state = (self.name, self.turns, self.calls, self.failed, self.executed, self.last, self.failure)
        return _restored, (type(self), self.tool.environment, self.tool.settings, self.reference, state)

    def step(self, response: Response) -> Sequence[Message]:
        """Execute the response's calls and return their outputs; empty if there are none, or at the last turn."""
        tool = self.tool
        if self.turns >= tool.max_turns or self.failure:
            return ()
        self.turns += 1
        self.last, parsed = _without_calls(response, tool.style, tool.function)
        if self.turns >= tool.max_turns:
            return ()
        outputs = [(self._output(call), call.id) for call in parsed.calls]
        outputs += [(self._error(f"Error: {problem}"), None) for problem in parsed.problems]
        if self.failure or not outputs:
            return ()
        if self.calls >= tool.max_calls or self.turns >= tool.max_turns - 1:
            text, key = outputs[-1]
            outputs[-1] = f"{text.removesuffix(_LAST_CALL).rstrip()}\n{_LAST_CALL}".lstrip(), key
        return tuple(Message(role="tool", content=text, tool_call_id=key) for text, key in outputs)

    def verdict(self) -> Verdict | Awaitable[Verdict]:
        """End the session, and return the verifier's verdict on the last response, with the numbers of calls."""
        self.tool.sessions.end(self.name)
        if self.failure:
            return Verdict.error(self.failure)
        assert self.tool.verify is not None
        verdict = self.tool.verify(self.last, self.reference)
        return self._later(verdict) if inspect.isawaitable(verdict) else self._counted(verdict)

    async def _later(self, verdict: Awaitable[Verdict]) -> Verdict:
        return self._counted(await verdict)

    @property
    def counts(self) -> Mapping[str, float]:
        """Numbers of calls and of failed calls."""
        return {"calls": self.calls, "failed_calls": self.failed}

    def _counted(self, verdict: Verdict) -> Verdict:
        return replace(verdict, more={**verdict.more, **self.counts})

    def _output(self, call: ToolCall) -> str:
        if self.calls >= self.tool.max_calls:
            return f"Error: at most {self.tool.max_calls} calls are allowed\n{_LAST_CALL}"
        function = self.tool.function
        try:
            if call.name != function.name:
                raise ToolError(f"unknown tool {call.name[:80]!r}: the only tool is {function.name}")
            output: str = function.call(cast(Any, self._execute), call.arguments)
            return output
        except ToolError as error:
            return self._error(f"Error: {error}")
        except (SandboxError, OSError) as error:
            self.failure = f"{type(error).__name__}: {error}"[:300]
            return "Error: the tool failed"

    def _error(self, text: str) -> str:
        self.calls += 1
        self.failed += 1
        return text[: self.tool.characters]

    def _execute(self, code: str) -> str:
        run, limits = self.tool.sessions.call(self.name, self.executed, code), self.tool.limits
        error = error_of(run)
        self.calls += 1
        self.failed += error != ""
        if error is None:
            reason = {
                "exit": f"the code ended the interpreter (exit status {run.status})",
                "signal": f"the code ended the interpreter (signal {run.status})",
                "time": f"the call took more than {limits.wall_seconds:g} s and was stopped",
                "memory": f"the call used more than {limits.memory_megabytes} MB of memory and was stopped",
            }.get(run.ended, f"the call was stopped ({run})")
            error = f"Error: {reason}; it had no effect on variables and files"
        else:
            self.executed.append(code)
        text = run.stdout.decode(errors="replace").rstrip("\n")
        text = "\n".join(filter(None, (text, error.rstrip("\n"))))
        return _shortened(text, self.tool.characters, more=len(run.stdout) >= limits.output_bytes) or "[no output]"


def _without_calls(response: Response, style: Style, function: Tool = TOOL) -> tuple[Response, ParsedCalls]:
    """Return a response without its reasoning and calls, and the calls."""
    parsed = calls_of(response, (function.schema,), style)
    return Response(text=parsed.answer, answer=parsed.answer, finished=response.finished), parsed


def _shortened(text: str, most: int, *, more: bool) -> str:
    """Omit the middle of a text of more than `most` characters; `more` says that the text was already truncated."""
    if len(text) <= most:
        return text
    half = most // 2
    omitted = f"{'more than ' * more}{len(text) - 2 * half:,} characters omitted"
    return f"{text[:half]}\n[... {omitted} ...]\n{text[len(text) - half :]}"


def environment(
    *,
    verifier: str = "math",
    settings: Mapping[str, Any] | None = None,
    judge: Mapping[str, Any] | None = None,
    max_calls: int = 16,
    max_turns: int | None = None,
    seconds: float = 10.0,
    characters: int = 8000,
    limits: Mapping[str, Any] | None = None,
    style: Style = "any",
    sessions: int = 256,
    idle_seconds: float = 3600.0,
    concurrency: int | None = None,
    isolation: str = "auto",
    strict: bool = False,
) -> Environment:
    """Create the environment `python_tool`, for tasks in which the model may run Python.

    Args:
        verifier: environment that verifies the last response, and whose references the tasks have.
        judge: settings of the verifier's judge; unused if it has none.
        max_calls: maximum number of calls per conversation.
        max_turns: maximum number of responses per conversation; None allows one more than `max_calls`.
        seconds: time limit of a call in seconds; 10 as in NeMo-Skills.
        characters: maximum length of a call's output; the middle of a longer one is omitted.
        limits: changes to `nemo_ext.rl.sandbox.limits.Limits`, except its times.
        style: format of tool calls in raw text; see `nemo_ext.chat.tool_calls`.
        sessions: maximum number of idle interpreters; those closed are rebuilt from their calls when needed.
        idle_seconds: number of seconds after which an idle interpreter is closed.
        concurrency, isolation, strict: see `nemo_ext.rl.sandbox.sandbox.Sandbox`.

    Raises:
        ValueError: a setting is invalid, or the verifier holds conversations itself.
        SandboxError: `strict` is set and namespaces are not available.
    """
    key = json.dumps({name: value for name, value in sorted(locals().items()) if value is not None}, default=dict)
    check_style(style)
    checked_whole("max_calls", max_calls, least=1)
    checked_whole("characters", characters, least=100)
    checked_whole("sessions", sessions, least=1)
    if not idle_seconds > 0:
        raise ValueError(f"idle_seconds must be a positive number, not {idle_seconds!r}")
    turns = max_calls + 1 if max_turns is None else checked_whole("max_turns", max_turns, least=2)
    for name in ("wall_seconds", "cpu_seconds"):
        if name in (limits or {}):
            raise ValueError(f"limits.{name} is not used: set seconds, the time limit of a call")
    judged = {"judge": judge} if judge is not None and "judge" in settings_of(verifier) else {}
    inner = make(verifier, {**(settings or {}), **judged})
    if (verify := inner.verify) is None or inner.begin is not None:
        raise ValueError(
            f"verifier={verifier} holds conversations itself, so it cannot be combined with the Python tool: choose a "
            "verifier of single responses"
        )
    applied = Limits(processes=16, output_bytes=1 << 20).changed({**(limits or {}), "wall_seconds": seconds})
    sandbox = Sandbox(limits=applied, concurrency=concurrency, isolation=cast(Any, isolation), strict=strict)
    tool = PythonTool(
        environment=NAME,
        settings=key,
        verify=verify,
        sessions=Sessions(sandbox, most=sessions, idle_seconds=idle_seconds),
        limits=applied,
        max_calls=max_calls,
        max_turns=turns,
        characters=characters,
        style=style,
    )
    share(tool)
    return Environment(
        name=NAME,
        check=inner.check,
        verify=lambda response, reference: verify(_without_calls(response, style)[0], reference),
        begin=lambda reference: Conversation(tool, reference),
        max_turns=turns,
        reach=inner.reach,
        tools=(TOOL.schema,),
    )


# By environment and settings, for conversations that were pickled in a different process.
_TOOLS: dict[tuple[str, str], PythonTool] = {}


def share(tool: PythonTool) -> None:
    """Keep an environment's tool for conversations that are unpickled in this process."""
    _TOOLS[tool.environment, tool.settings] = tool


def _restored(
    kind: type[Conversation], environment: str, settings: str, reference: Any, state: tuple[Any, ...]
) -> Conversation:
    if (environment, settings) not in _TOOLS:
        make(environment, json.loads(settings))
    return kind(_TOOLS[environment, settings], reference, *state)
