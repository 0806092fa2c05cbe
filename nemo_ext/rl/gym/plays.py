"""Conversations that a server stores between an agent's requests, keyed by session."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.task import Task

MAX_PLAYS = 50_000
"""Maximum number of stored conversations, more than an engine has at the same time."""


class NoPlayError(LookupError):
    """Raised if a session has no conversation, or one that belongs to another row."""


@dataclass
class Play:
    """State of a conversation.

    Attributes:
        episode: state for the next response.
        replies: mapping from the latest response's id to the reply, so that a lost request can be sent again. The
            response itself is not stored, to save memory.
        lock: held while a call is executed.
    """

    episode: Episode
    replies: dict[str, "asyncio.Task[dict[str, Any]]"] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Plays:
    """Conversations keyed by session. A session is one rollout, and its conversation starts only once.

    If a model calls a tool with the name of a route of the server, the call must neither restart the conversation nor
    start one with another task.
    """

    def __init__(self) -> None:
        self._plays: OrderedDict[str, Play] = OrderedDict()

    def begin(self, session: str, task: Task, make: Callable[[], Episode]) -> None:
        """Start a session's conversation; do nothing if the request is a retry.

        Raises:
            NoPlayError: the session already has a conversation, which has advanced or is for another task.
        """
        play = self._plays.get(session)
        if play is not None:
            if _same(play.episode.task, task) and not play.episode.turn and not play.replies:
                return
            raise NoPlayError("this session already has a conversation; use a new session for each rollout")
        self._plays[session] = Play(make())
        if len(self._plays) > MAX_PLAYS:
            self._plays.popitem(last=False)

    def get(self, session: str, task: Task | None = None) -> Play:
        """Return a session's conversation; raise NoPlayError if it has none, or was not started with `task`."""
        if session not in self._plays:
            raise NoPlayError("no conversation was started in this session; send /seed_session or /reset first")
        self._plays.move_to_end(session)
        play = self._plays[session]
        if task is not None and not _same(play.episode.task, task):
            raise NoPlayError(
                "this session's conversation was started with another task; use a new session for each rollout"
            )
        return play


def _same(task: Task, other: Task) -> bool:
    return (task.id, task.reference) == (other.id, other.reference)
