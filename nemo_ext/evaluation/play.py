"""Multi-turn conversations in which a model uses an environment's tools and may talk to a simulated user."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_ext.chat.sample import openai_messages
from nemo_ext.endpoint.client import Answer
from nemo_ext.evaluation.score import said
from nemo_ext.rl.environments import VerifiedLater
from nemo_ext.rl.episodes import Episode, Episodes
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Play:
    """A finished conversation.

    Attributes:
        turns: messages after the initial ones.
        answers: the model's answers; the last one has a problem if a failed request ended the conversation.
        verdict: verdict on the environment's final state; None if a request failed, or if it is left to
            `Environment.verify` and the environment did not fail.
        counts: numeric metrics of the verdict or, without a verdict, of the conversation.
    """

    turns: Messages
    answers: Sequence[Answer]
    verdict: Verdict | None = None
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Playing:
    """Player of conversations.

    Attributes:
        episodes: episodes of the environment.
        answer: function that returns the model's answer, given all messages so far and the turn's index from 0.
        user: function that, given the turns so far, returns the user's next message, or None to end the conversation;
            without such a function, the user says only what is in the task.
        verify: False to leave the verdict to `Environment.verify`, if the conversations are `VerifiedLater`.
    """

    episodes: Episodes
    answer: Callable[[Messages, int], Awaitable[Answer]]
    user: Callable[[Messages], Awaitable[str | None]] | None = None
    verify: bool = True

    async def play(self, task: Task, messages: Messages) -> Play:
        """Hold the conversation on a task, from its initial messages to the end."""
        episode = self.episodes.begun(Episode(task=task, thinking_opened=False))
        turns: list[Mapping[str, Any]] = []
        answers: list[Answer] = []
        while True:
            answer = await self.answer([*messages, *turns], len(answers))
            full = bool(answers) and answer.too_long
            if full:  # the model did not finish within its context
                answer = replace(answer, answer="", problem="", finish_reason="length")
            answers.append(answer)
            if answer.problem:
                return Play(turns=turns, answers=answers)
            parsed = said(answer.answer or "", answer.reasoning, answer.tool_calls)
            turn = await self.episodes.turn(episode, parsed.response, parsed.unreadable, close=False)
            turns.append(message_of(answer))
            if turn.following is None:  # the environment failed
                return Play(turns=turns, answers=answers, verdict=turn.verdict)
            episode = turn.following
            if turn.answers:
                turns += openai_messages(turn.answers, arguments_as_text=True)
                continue
            over = len(answers) >= self.episodes.environment.max_turns or answer.tool_calls or full
            text = None if over or self.user is None else await self.user(turns)
            if text is not None:
                turns.append({"role": "user", "content": text})
                continue
            conversation = episode.conversation
            if self.verify or not isinstance(conversation, VerifiedLater):
                turn = await self.episodes.close(turn)
                more = turn.verdict.more if turn.verdict else {}
                counts = {name: value for name, value in more.items() if isinstance(value, int | float)}
                return Play(turns=turns, answers=answers, verdict=turn.verdict, counts=counts)
            failed = Verdict.error(conversation.failure) if conversation.failure else None
            return Play(turns=turns, answers=answers, verdict=failed, counts=conversation.counts)


def message_of(answer: Answer) -> dict[str, Any]:
    """Convert a model's answer to an OpenAI message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.answer or ""}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [json.loads(json.dumps(call)) for call in answer.tool_calls]
    return message
