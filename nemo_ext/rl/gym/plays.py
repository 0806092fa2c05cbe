"""Conversations that a server keeps between an agent's requests, by the agent's session."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_ext.rl.episodes import Episode
from nemo_ext.rl.task import Task

MAX_PLAYS = 50_000
"""Number of conversations that are kept; no engine holds more at once."""


class NoPlayError(LookupError):
    """The session has no conversation, or another one."""


@dataclass
class Play:
    """One conversation.

    Attributes:
        episode: episode of the next response.
        replies: reply to the latest response, by its id, so that a lost request may be sent again; without the
            response, since many are kept.
    """

    episode: Episode
    replies: dict[str, "asyncio.Task[dict[str, Any]]"] = field(default_factory=dict)


class Plays:
    """Conversations by session. One rollout is one session, and a session is begun once.

    A model may call a tool that it names like one of the server's routes: this must not restart its conversation, nor
    begin one with another task.
    """

    def __init__(self) -> None:
        self._plays: OrderedDict[str, Play] = OrderedDict()

    def begin(self, session: str, task: Task, make: Callable[[], Episode]) -> None:
        """Begin a conversation; the same request again changes nothing.

        Raises:
            NoPlayError: the session has one under way.
        """
        there = self._plays.get(session)
        if there is not None:
            if _same(there.episode.task, task) and not there.episode.turn and not there.replies:
                return
            raise NoPlayError("this session has a conversation already: each rollout has a session of its own")
        self._plays[session] = Play(make())
        if len(self._plays) > MAX_PLAYS:
            self._plays.popitem(last=False)

    def get(self, session: str, task: Task | None = None) -> Play:
        """Conversation of a session, marked as the most recently used.

        Raises:
            NoPlayError: there is none, or it was begun with another task.
        """
        if session not in self._plays:
            raise NoPlayError("no conversation was begun in this session")
        self._plays.move_to_end(session)
        play = self._plays[session]
        if task is not None and not _same(play.episode.task, task):
            raise NoPlayError("this session's conversation was begun with another task")
        return play


def _same(one: Task, other: Task) -> bool:
    return (one.id, one.reference) == (other.id, other.reference)
