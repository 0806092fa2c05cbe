"""The environments by name: what checks a reference, and what verifies a response or holds a conversation.

Engines' adapters know no environment by itself: they look a task's up here.
"""

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.job.settings import check_keys, nearest
from nemo_ext.rl.verdict import Verdict


class Conversation(Protocol):
    """A tool environment's state in one rollout. Pickles, so that an engine may keep it between turns."""

    def step(self, response: Response) -> Sequence[Message]:
        """Carry out the response's calls; the tools' answers, or nothing if the conversation is over."""
        ...

    def verdict(self) -> Verdict:
        """Whether the state at the end is what the task asks for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment.

    Attributes:
        name: in task files.
        check: raises ValueError for a reference that it cannot verify against, naming the key; returns it parsed.
        verify: the verdict on a response, given what `check` returned; never raises on what a model wrote. None for
            environments with `begin`.
        begin: a new conversation, given what `check` returned; None for environments of a single turn.
        max_turns: responses in one conversation at most.
        waits: whether `verify` waits for something else (processes, a judge), so that many may run at once.
        judged_in_groups: a response earns nothing by itself: a judge compares it with the others of its group.
        reach: raises ValueError if what it asks, a judge, is not there; for the start of a run.
    """

    name: str
    check: Callable[[Mapping[str, Any]], Any]
    verify: Callable[[Response, Any], Verdict | Awaitable[Verdict]] | None = None
    begin: Callable[[Any], Conversation] | None = None
    max_turns: int = 1
    waits: bool = False
    judged_in_groups: bool = False
    reach: Callable[[], Awaitable[None]] | None = None


# Modules are imported when their environment is made: each has a function `environment(**settings)`.
ENVIRONMENTS: Mapping[str, str] = {
    "math": "nemo_ext.rl.verifiers.math",
    "multiple_choice": "nemo_ext.rl.verifiers.multiple_choice",
    "structured_output": "nemo_ext.rl.verifiers.structured_output",
    "instructions": "nemo_ext.rl.verifiers.instructions",
    "code": "nemo_ext.rl.verifiers.code",
    "judge": "nemo_ext.rl.verifiers.judge",
    "genrm": "nemo_ext.rl.verifiers.genrm",
    "chat": "nemo_ext.rl.verifiers.chat",
    "tool_calls": "nemo_ext.rl.verifiers.tool_calls",
    "tool_hallucination": "nemo_ext.rl.verifiers.tool_hallucination",
    "workplace": "nemo_ext.rl.worlds.workplace",
    "bank": "nemo_ext.rl.worlds.bank",
}


def make(name: str, settings: Mapping[str, Any] | None = None) -> Environment:
    """The environment of a name.

    Args:
        settings: what its module's `environment` takes, limits for example.

    Raises:
        ValueError: there is none of that name, or it does not know a setting.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment: unknown name {name!r}: {nearest(name, ENVIRONMENTS)}")
    build = importlib.import_module(ENVIRONMENTS[name]).environment
    parameters = inspect.signature(build).parameters
    required = tuple(key for key, parameter in parameters.items() if parameter.default is parameter.empty)
    check_keys(settings or {}, tuple(parameters), required=required, where=f"environment {name}: settings")
    made: Environment = build(**(settings or {}))
    return made
