"""Conversations that a server keeps between an agent's requests, by the agent's session."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.rl.environments import Conversation
from nemo_ext.rl.gym.responses import Answered
from nemo_ext.rl.verdict import Verdict

MAX_PLAYS = 50_000
"""Number of conversations that are kept; no engine holds more at once."""


class NoPlayError(LookupError):
    """The session has no conversation, or another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The world's reply to a response.

    Attributes:
        outputs: the tools' answers, with the ids of the calls.
        observation: text of the user, or of tools for calls without an id; "" if none.
        verdict: verdict at the end; None while the conversation goes on.
    """

    outputs: tuple[tuple[str, str], ...] = ()
    observation: str = ""
    verdict: Verdict | None = None


@dataclass
class Play:
    """One conversation.

    Attributes:
        task: task that it began with.
        conversation: state of the conversation.
        max_turns: maximum number of responses.
        turns: number of responses so far.
        replies: reply to the latest response, by its id, so that a lost request may be sent again.
    """

    task: Mapping[str, Any]
    conversation: Conversation
    max_turns: int
    turns: int = 0
    replies: dict[str, Reply] = field(default_factory=dict)

    def step(self, answered: Answered, identity: str) -> Reply:
        """Carry out a response; the conversation ends when the world has no reply, or after the last turn."""
        if identity in self.replies:
            return self.replies[identity]
        self.turns += 1
        response, outputs = answered.response, [(key, f"Error: {why}") for key, why in answered.unreadable.items()]
        # If no call can be read, the text beside the calls is not for the user.
        said = self.conversation.step(response) if response.tool_calls or not outputs else ()
        outputs += [(message.tool_call_id, message.content) for message in said if message.tool_call_id]
        observation = "\n\n".join(message.content for message in said if not message.tool_call_id)
        if self.turns >= self.max_turns or not (outputs or observation):
            reply = Reply(verdict=self.conversation.verdict())
        else:
            reply = Reply(outputs=tuple(outputs), observation=observation)
        self.replies = {identity: reply}
        return reply

    def call(self, response: Response) -> str:
        """Answer to a single call, for agents that carry out calls one by one and count the turns themselves."""
        self.turns += 1
        return "\n\n".join(message.content for message in self.conversation.step(response))

    def close(self, response: Response) -> Verdict:
        """Verdict after a last message without calls."""
        if response.answer:
            self.conversation.step(Response(text=response.text, answer=response.answer))
        return self.conversation.verdict()


class Plays:
    """Conversations by session. One rollout is one session, and a session is begun once.

    A model may call a tool that it names like one of the server's routes: this must not restart its conversation, nor
    begin one with another task.
    """

    def __init__(self) -> None:
        self._plays: OrderedDict[str, Play] = OrderedDict()

    def begin(self, session: str, task: Mapping[str, Any], make: Callable[[], Play]) -> None:
        """Begin a conversation; the same request again changes nothing.

        Raises:
            NoPlayError: the session has one under way.
        """
        there = self._plays.get(session)
        if there is not None:
            if there.task == task and not there.turns:
                return
            raise NoPlayError("this session has a conversation already: each rollout has a session of its own")
        self._plays[session] = make()
        if len(self._plays) > MAX_PLAYS:
            self._plays.popitem(last=False)

    def get(self, session: str, task: Mapping[str, Any] | None = None) -> Play:
        """Conversation of a session, marked as the most recently used.

        Raises:
            NoPlayError: there is none, or it was begun with another task.
        """
        if session not in self._plays:
            raise NoPlayError("no conversation was begun in this session")
        self._plays.move_to_end(session)
        play = self._plays[session]
        if task is not None and play.task != task:
            raise NoPlayError("this session's conversation was begun with another task")
        return play
