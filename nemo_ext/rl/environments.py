"""Environments, looked up by name: each checks references, and verifies responses or holds conversations.

Engine adapters look up a task's environment here.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.job.registry import entry_points, ours
from nemo_ext.job.settings import check_keys, nearest
from nemo_ext.rl.verdict import Verdict


class Conversation(Protocol):
    """State of a tool environment in one rollout. It is picklable, so an engine may keep it between turns."""

    def step(self, response: Response) -> Sequence[Message]:
        """Execute a response's tool calls and return the results; empty if the conversation is over."""
        ...

    def verdict(self) -> Verdict | Awaitable[Verdict]:
        """Return the verdict on the final state, or an awaitable of it; nothing is executed afterwards."""
        ...


@runtime_checkable
class VerifiedLater(Conversation, Protocol):
    """Conversation whose environment has `verify`, which verifies the last response without the conversation.

    Attributes:
        failure: failure of the environment, which is not the model's fault; "" if there was none.
    """

    failure: str

    @property
    def counts(self) -> Mapping[str, float]:
        """Metrics of the conversation, by name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment that verifies single responses or holds conversations.

    Attributes:
        name: name in task files.
        check: function that parses a reference; if it is invalid, raises a ValueError that names the key.
        verify: function that returns the verdict on a response, given the parsed reference. It never raises on model
            output. With `begin`, it judges the last response of a finished conversation; None if the verdict depends on
            the conversation's state.
        begin: function that starts a conversation, given the parsed reference; None for single-turn environments.
        max_turns: maximum number of responses in one conversation.
        tools: tools that its tasks must declare; empty if the tasks choose them.
        waits: True if `verify` waits for processes or a judge, so that many calls can run concurrently.
        judged_in_groups: True if the reward comes from a judge that compares the responses of a group.
        reach: coroutine that raises ValueError if the environment's judge cannot be reached; awaited when a run starts.
    """

    name: str
    check: Callable[[Mapping[str, Any]], Any]
    verify: Callable[[Response, Any], Verdict | Awaitable[Verdict]] | None = None
    begin: Callable[[Any], Conversation] | None = None
    max_turns: int = 1
    tools: tuple[Mapping[str, Any], ...] = ()
    waits: bool = False
    judged_in_groups: bool = False
    reach: Callable[[], Awaitable[None]] | None = None


GYM = "gym-"
"""Prefix of the names of NeMo Gym's own environments (`nemo_ext.rl.gym_servers`), which only Gym runs."""
GROUP = "nemo_ext.environments"
"""Group of entry points `NAME = "module"`; the module's `environment(**settings)` creates the environment."""


def known_environments() -> tuple[str, ...]:
    """Return the names of all environments in installed packages."""
    return tuple(entry_points(GROUP))


def make(name: str, settings: Mapping[str, Any] | None = None) -> Environment:
    """Create an environment by name.

    Args:
        settings: arguments for its module's `environment` function, such as time limits.

    Raises:
        ValueError: the environment or a setting is unknown, or a setting is missing or invalid.
    """
    known = settings_of(name)
    required = tuple(key for key, needed in known.items() if needed)
    check_keys(settings or {}, tuple(known), required=required, where=f"settings of environment {name}")
    try:
        environment: Environment = _module(name).environment(**(settings or {}))
    except ValueError as error:
        raise ValueError(f"environment {name}: {error}") from error
    return environment


def settings_of(name: str) -> dict[str, bool]:
    """Return a mapping from an environment's setting names to whether each is required.

    Raises:
        ValueError: the environment is unknown.
    """
    parameters = inspect.signature(_module(name).environment).parameters
    return {key: parameter.default is parameter.empty for key, parameter in parameters.items()}


def with_turns(name: str, settings: Mapping[str, Any], turns: int) -> dict[str, Any]:
    """Return an environment's settings, in which `max_turns` defaults to the algorithm's `turns` if that exceeds 1.

    Raises:
        ValueError: the environment is unknown.
    """
    default = {"max_turns": turns} if turns > 1 and "max_turns" in settings_of(name) else {}
    return {**default, **settings}


def _module(name: str) -> Any:
    if name.startswith(GYM):
        raise ValueError(
            f"environment {name} is NeMo Gym's own, which only `nemo-ext rl engine=nemo_rl` supports; use this job, or "
            "another environment"
        )
    point = ours(GROUP).get(name) or entry_points(GROUP).get(name)
    if point is None:
        raise ValueError(f"unknown environment {name!r}: {nearest(name, known_environments())}")
    return point.load()
