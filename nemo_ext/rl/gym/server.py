"""NeMo Gym resources server for any environment, called over HTTP.

/seed_session and /verify     for Gym's simple_agent: returns a response's reward
/TOOL                         for a world's tools: one call per request, in the session's conversation
/reset and /step              for Gym's gymnasium_agent: conversations in which a user speaks between turns

Model output never makes a request fail. Failures of the verifier are marked, so that Gym's rollout collection excludes
them from the results and tries again.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.rollout_collection import NG_FAILURE_CLASS_KEY
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from nemo_ext.chat.response import Answered, Response
from nemo_ext.chat.tool_calls import read_openai_calls
from nemo_ext.job.settings import nearest
from nemo_ext.rl.episodes import Episode, Episodes, Turn
from nemo_ext.rl.gym.plays import NoPlayError, Play, Plays
from nemo_ext.rl.gym.responses import last_turn, read_answer
from nemo_ext.rl.gym.rows import SETTINGS, of_gym
from nemo_ext.rl.task import Task

_MANY_TURNS = 10_000  # for conversations of single calls, which the agent's max_steps limits
# Keys that Gym writes into a server's config.
_GYM_KEYS = ("verified", "verified_url", "description", "value", "datasets", "license")


class OwnConfig(BaseResourcesServerConfig):
    """Config of a server; a key that neither Gym nor the server knows raises ValueError."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _known(self) -> "OwnConfig":
        known = (*type(self).model_fields, *_GYM_KEYS)
        for key in self.model_extra or {}:
            if key not in known:
                raise ValueError(f"unknown key {key!r} in the server's config: {nearest(key, known)}")
        return self


class VerifierConfig(OwnConfig):
    """Config of an environment's server.

    Attributes:
        environment: one of `nemo_ext.rl.environments.known_environments()`.
        settings: settings of the environment; max_tests of the environment code defaults to 1000 here.
        reward: reward as in an engine's config: outcome, score, {name: domyn_math, ...}.
        thinking_opened: True if prompts end inside a reasoning trace and the model server does not parse reasoning.
        concurrency: number of concurrent verifications.
    """

    environment: str
    settings: dict[str, Any] = Field(default_factory=dict)
    reward: str | dict[str, Any] = "outcome"
    thinking_opened: bool = False
    concurrency: int = 64


class VerifyRequest(BaseVerifyRequest):
    """A row and the response to it."""

    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    """A row with its reward and the values that Gym turns into metrics."""

    model_config = ConfigDict(extra="allow")


class VerifierServer(SimpleResourcesServer):
    """Server of one environment."""

    config: VerifierConfig
    _episodes: Episodes = PrivateAttr()
    _by_call: Episodes = PrivateAttr()
    _plays: Plays = PrivateAttr(default_factory=Plays)

    def model_post_init(self, context: Any) -> None:
        """Create the environment."""
        super().model_post_init(context)
        config = self.config
        shared = {"name": config.environment, "reward": config.reward, "concurrency": config.concurrency}
        settings = {**SETTINGS.get(config.environment, {}), **config.settings}
        self._episodes = self._by_call = Episodes({**shared, "settings": settings})
        if self._episodes.environment.judged_in_groups:
            raise ValueError(
                f"environment {config.environment!r} is judged in groups, not by this server; use the server genrm"
            )
        if self._has_turns:
            if (config.num_workers or 1) > 1:
                raise ValueError(
                    f"num_workers must be 1, not {config.num_workers}, because one process stores the conversations"
                )
            self._by_call = Episodes({**shared, "settings": {**settings, "max_turns": _MANY_TURNS}})

    @property
    def _has_turns(self) -> bool:
        return self._episodes.environment.begin is not None

    def setup_webserver(self) -> FastAPI:
        """Return the app with the server's routes."""
        app: FastAPI = super().setup_webserver()
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        if self._has_turns:
            app.post("/{tool:path}")(self.call)  # last, since it matches every name
        return app

    async def seed_session(self, request: Request, body: dict[str, Any]) -> BaseSeedSessionResponse:
        """Start a rollout whose tool calls will be passed to `call`."""
        self._begin(request, body, self._by_call)
        return BaseSeedSessionResponse()

    async def call(self, request: Request, tool: str) -> PlainTextResponse:
        """Execute one tool call and return its result; the agent counts the turns."""
        play = self._play(request)
        read = read_openai_calls([{"name": tool, "arguments": (await request.body()).decode(errors="replace")}])
        if read.problems:
            return PlainTextResponse(f"Error: {read.problems[0].partition(': ')[2]}")
        conversation = play.episode.conversation
        assert conversation is not None
        async with play.lock:
            play.episode = replace(play.episode, turn=play.episode.turn + 1)
            results = await self._by_call.stepped(conversation, Response(text="", tool_calls=read.calls))
        return PlainTextResponse("\n\n".join(message.content for message in results).encode(errors="replace"))

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Return the row with the reward of its response, or of the conversation's final state."""
        row = body.model_dump()
        task, answered = self._task_and_response(row)
        if self._has_turns:
            episode = self._play(request, task).episode
            last = self._read(last_turn(row["response"])).response
            assert episode.conversation is not None
            if last.answer:
                await self._by_call.stepped(episode.conversation, Response(text=last.text, answer=last.answer))
            turn = await self._by_call.close(Turn(response=answered.response, following=episode))
        else:
            turn = await self._episodes.turn(self._episode(task), answered.response, answered.unreadable)
        outputs = sum(item.get("type") == "function_call_output" for item in row["response"]["output"])
        return VerifyResponse(**{**row, **_outcome(turn), "tool_outputs": outputs})

    async def get_reverify_mode(self) -> str:
        """Return how `gym eval reverify` (Gym 0.7) can verify again: "stateless", or "unsupported" with several turns.

        Conversations are not kept, so they cannot be verified again.
        """
        return "unsupported" if self._has_turns else "stateless"

    async def reset(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Start a rollout whose turns will be passed to `step`."""
        self._begin(request, body, self._episodes)
        return {"observation": None, "info": {}}

    async def step(self, request: Request, body: VerifyRequest) -> dict[str, Any]:
        """Return the environment's reply to one response, with the reward at the end of the conversation."""
        row = body.model_dump()
        task, answered = self._task_and_response(row)
        if not self._has_turns:
            return await self._reply(Play(self._episode(task)), answered)
        play, identity = self._play(request, task), row["response"]["id"]
        if identity not in play.replies:
            play.replies = {identity: asyncio.create_task(self._reply(play, answered))}
        # A request that is cancelled and sent again must not execute its calls twice.
        return await asyncio.shield(play.replies[identity])

    async def _reply(self, play: Play, answered: Answered) -> dict[str, Any]:
        turn = await self._episodes.turn(play.episode, answered.response, answered.unreadable)
        if turn.following is None:
            outcome = _outcome(turn)
            return {"reward": outcome.pop("reward"), "terminated": True, "info": outcome}
        play.episode = turn.following
        outputs = [
            {"call_id": message.tool_call_id, "output": message.content}
            for message in turn.answers
            if message.tool_call_id
        ]
        observation = "\n\n".join(message.content for message in turn.answers if not message.tool_call_id)
        return {"observation": observation or None, "info": {"tool_outputs": outputs}}

    def _begin(self, request: Request, body: Mapping[str, Any], episodes: Episodes) -> None:
        if not self._has_turns:
            return
        task = self._task(body)
        try:
            self._plays.begin(request.session[SESSION_ID_KEY], task, lambda: episodes.begun(self._episode(task)))
        except NoPlayError as error:
            raise HTTPException(409, str(error)) from None

    def _play(self, request: Request, task: Task | None = None) -> Play:
        try:
            return self._plays.get(request.session[SESSION_ID_KEY], task)
        except NoPlayError as error:
            raise HTTPException(400, str(error)) from None

    def _task(self, row: Mapping[str, Any]) -> Task:
        try:
            task = of_gym(row, self.config.environment)
        except (ValueError, LookupError, TypeError) as error:
            raise HTTPException(422, f"{self.config.name}: invalid row ({error})") from None
        try:
            self._episodes.check(task)
        except ValueError as error:
            raise HTTPException(422, f"{self.config.name}: task {task.id!r} cannot be verified ({error})") from None
        return task

    def _read(self, response: Mapping[str, Any]) -> Answered:
        return read_answer(response, thinking_opened=self.config.thinking_opened)

    def _task_and_response(self, row: Mapping[str, Any]) -> tuple[Task, Answered]:
        task, answered = self._task(row), self._read(row["response"])
        if self._episodes.reward.counts_tokens and answered.response.tokens is None:
            raise HTTPException(
                500,
                f"reward {self.config.reward!r} counts tokens, but the model server reports no usage; choose a reward "
                "that does not, such as outcome",
            )
        return task, answered

    def _episode(self, task: Task) -> Episode:
        # Without prompt and tools, which the engine has, to save memory.
        return Episode(task=replace(task, prompt=(), tools=()), thinking_opened=self.config.thinking_opened)


def _outcome(turn: Turn) -> dict[str, Any]:
    """Return the reward and metrics of a response."""
    verdict, reward = turn.verdict, turn.reward
    assert verdict is not None and reward is not None
    return {
        "reward": reward.total,
        **{f"reward/{name}": value for name, value in reward.parts.items()},
        "correct": verdict.outcome == "correct",
        "score": verdict.score,
        **failure(verdict.outcome == "error", verdict.reason),
        "verdict": {"outcome": verdict.outcome, "reason": verdict.reason, "answer": verdict.answer},
    }


def failure(failed: bool, reason: str) -> dict[str, Any]:
    """Return the fields that mark whether the verifier failed.

    Metrics and Gym's rollout collection read them; since Gym 0.7 they also exclude the sample from scores and training.
    """
    if not failed:
        return {"verifier_error": False}
    marks = {NG_FAILURE_CLASS_KEY: "verifier_error", "mask_sample": True, "failure_kind": "verifier_error"}
    return {"verifier_error": True, **marks, "failure_reason": reason}
