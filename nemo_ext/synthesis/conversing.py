"""Conversations in which a model uses an environment's tools and may talk to a model that simulates the user."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_ext.chat.sample import openai_messages
from nemo_ext.endpoint.client import Answer, Client, Request
from nemo_ext.evaluation.play import Messages, Playing
from nemo_ext.evaluation.score import said
from nemo_ext.job.records import json_line
from nemo_ext.job.seeds import digest
from nemo_ext.rl.episodes import Episodes
from nemo_ext.rl.task import Task
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.rows import Row
from nemo_ext.synthesis.settings import Converse


@dataclass(frozen=True, slots=True, kw_only=True)
class Play(Request):
    """Request for a conversation: the task, and the row that it was made from."""

    task: Task
    row: Row


class Conversing(Client):
    """Client whose answers are whole conversations, encoded as JSON: `messages`, `correct`, `score`, `why`, and the
    verdict's further numbers.

    Args:
        client: the model's client.
        step: the step's settings.
        context: the step's context.
        episodes: function that returns the episodes of the environment with a given name.
        user: client of the model that simulates the user; None if there is none.
    """

    def __init__(
        self,
        client: Client,
        step: Converse,
        context: Context,
        episodes: Callable[[str], Episodes],
        user: Client | None = None,
    ) -> None:
        self.__dict__ = client.__dict__
        self._step, self._context, self._episodes, self._user = step, context, episodes, user

    async def ask(self, request: Request, **more: Any) -> Answer:
        """Hold one conversation and return it as the answer; requests other than `Play` are passed to `Client.ask`."""
        if not isinstance(request, Play):
            return await super().ask(request, **more)
        context, task, step = self._context, request.task, self._step
        first = openai_messages(task.prompt, arguments_as_text=True)
        more = {"tools": list(task.tools)} if task.tools else {}

        async def answer(messages: Messages, turn: int) -> Answer:
            seed = digest(request.body["seed"], turn) >> 33
            return await super(Conversing, self).ask(
                Request(body={**request.body, **more, "seed": seed, "messages": list(messages)})
            )

        problems, spoken, full = list[str](), 0, False

        async def user(turns: Messages) -> str | None:
            nonlocal spoken, full
            assert step.user is not None and self._user is not None
            spoken += 1
            if spoken > step.user.max_turns:
                return None
            variables = context.names(request.row, request=task.prompt[-1].content)
            system = context.text("user.system", step.user.system, variables)
            seed = digest(request.body["seed"], "user", spoken) >> 33
            before = [first[-1]] if turns else []
            messages = [{"role": "system", "content": system}, *_with_swapped_roles([*before, *turns])]
            response = await self._user.ask(Request(body={"seed": seed, "messages": messages}))
            if spoken > 1 and response.too_long:
                full = True
                return None
            if response.problem:
                problems.append(f"user: {response.problem}")
                return None
            text = said(response.answer or "", response.reasoning, ()).response.answer
            return None if not text or step.user.end in text else text

        if step.user is not None:
            opening = await user([])
            if opening is None:
                why = problems[0] if problems else "user: the model ended the conversation before its first message"
                return Answer(key=request.key, sample=request.sample, problem=why)
            first = [*first[:-1], {"role": "user", "content": opening}]
        playing = Playing(
            episodes=self._episodes(task.environment), answer=answer, user=None if step.user is None else user
        )
        play = await playing.play(task, first)
        last, verdict = play.answers[-1], play.verdict
        problem = last.problem or next(iter(problems), "")
        if not problem and (verdict is None or verdict.outcome == "error"):
            problem = f"environment: {verdict.reason if verdict else 'no verdict'}"
        if problem or verdict is None:
            return Answer(key=request.key, sample=request.sample, problem=problem, status=last.status)
        cut = full or any(response.finish_reason == "length" for response in play.answers)
        whole = {
            "messages": [*first, *play.turns],
            "correct": verdict.outcome == "correct" and not cut,
            "score": 0.0 if cut else verdict.score,
            **verdict.more,
            "why": "an answer was truncated" if cut else verdict.reason,
        }
        return Answer(
            key=request.key,
            sample=request.sample,
            answer=json_line(whole).decode(),
            finish_reason="stop",
            prompt_tokens=sum(response.prompt_tokens or 0 for response in play.answers),
            completion_tokens=sum(response.completion_tokens or 0 for response in play.answers),
            seed=request.body["seed"],
            seconds=sum(response.seconds for response in play.answers),
            status=200,
        )


def _with_swapped_roles(turns: Messages) -> list[dict[str, str]]:
    """Return a conversation's text messages with user and assistant swapped, for the model that simulates the user."""
    names = {"user": "assistant", "assistant": "user"}
    spoken = [
        {"role": names[turn["role"]], "content": str(turn["content"])}
        for turn in turns
        if turn["role"] in names and turn.get("content") and not turn.get("tool_calls")
    ]
    return spoken or [{"role": "user", "content": "Hello, what can I do for you?"}]
