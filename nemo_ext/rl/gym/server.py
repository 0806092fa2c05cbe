"""The NeMo Gym resources server of any environment, called over HTTP.

/seed_session and /verify     for Gym's simple_agent: the reward of a response
/TOOL                         a world's tools, one call a request, in the session's conversation
/reset and /step              for Gym's gymnasium_agent: conversations in which a user has more to say, turn by turn

Model output never makes a request fail. Failures of the verifier itself are marked so that Gym's rollout collection
keeps them out of the results and tries again.
"""

import asyncio
import inspect
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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

from nemo_ext.chat.response import Response
from nemo_ext.chat.tool_calls import read_openai_calls
from nemo_ext.job.settings import checked_whole, nearest
from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.episodes import References
from nemo_ext.rl.gym.plays import NoPlayError, Play, Plays
from nemo_ext.rl.gym.responses import Answered, last_turn, read_answer
from nemo_ext.rl.gym.rows import of_gym
from nemo_ext.rl.rewards.named import Facts, NamedReward, reward_of
from nemo_ext.rl.task import Task
from nemo_ext.rl.verdict import Verdict

_MANY_TURNS = 10_000  # of tools that are called one by one: the agent's max_steps ends them
# Keys that Gym itself writes into a server's config.
_GYM_KEYS = ("verified", "verified_url", "description", "value", "datasets", "license")


class OwnConfig(BaseResourcesServerConfig):
    """Config of a server; unknown keys are errors.

    Raises:
        ValueError: a key that neither Gym nor the server knows, or several worker processes.
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _known(self) -> "OwnConfig":
        known = (*type(self).model_fields, *_GYM_KEYS)
        for key in self.model_extra or {}:
            if key not in known:
                raise ValueError(f"unknown key {key!r}: {nearest(key, known)}")
        return self


class VerifierConfig(OwnConfig):
    """Config of the server of an environment.

    Attributes:
        environment: a key of `nemo_ext.rl.environments.ENVIRONMENTS`.
        settings: settings of the environment.
        reward: reward as in the engines' configs: outcome, score, {name: domyn_math, ...}.
        thinking_opened: True if the model's prompts end inside a trace and the model server parses no reasoning.
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
    """Serves one environment."""

    config: VerifierConfig
    _environment: Environment = PrivateAttr()
    _by_call: Environment = PrivateAttr()
    _reward: NamedReward = PrivateAttr()
    _threads: ThreadPoolExecutor = PrivateAttr()
    _references: References = PrivateAttr()
    _plays: Plays = PrivateAttr(default_factory=Plays)

    def model_post_init(self, context: Any) -> None:
        """Make the environment."""
        super().model_post_init(context)
        config = self.config
        self._environment = self._by_call = make(config.environment, config.settings)
        if self._environment.judged_in_groups:
            raise ValueError(f"environment {config.environment!r}: its judge is a server of its own, genrm")
        self._reward = reward_of(config.reward)
        self._references = References(self._environment.check)
        self._threads = ThreadPoolExecutor(checked_whole("concurrency", config.concurrency, least=1))
        if self._environment.begin is not None:
            if (config.num_workers or 1) > 1:
                raise ValueError("num_workers must be 1: conversations live in one process")
            self._by_call = make(config.environment, {**config.settings, "max_turns": _MANY_TURNS})

    def setup_webserver(self) -> FastAPI:
        """App with the server's routes."""
        app: FastAPI = super().setup_webserver()
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        if self._environment.begin is not None:
            app.post("/{tool:path}")(self.call)  # the last, since it takes every name
        return app

    async def seed_session(self, request: Request, body: dict[str, Any]) -> BaseSeedSessionResponse:
        """Begin a rollout."""
        self._begin(request, body, self._by_call)
        return BaseSeedSessionResponse()

    async def call(self, request: Request, tool: str) -> PlainTextResponse:
        """Answer of a world to one call."""
        try:
            play = self._plays.get(request.session[SESSION_ID_KEY])
        except NoPlayError as error:
            raise HTTPException(400, str(error)) from None
        read = read_openai_calls([{"name": tool, "arguments": (await request.body()).decode(errors="replace")}])
        if read.problems:
            return PlainTextResponse(f"Error: {read.problems[0].partition(': ')[2]}")
        said = play.call(Response(text="", tool_calls=read.calls))
        return PlainTextResponse(said.encode(errors="replace"))

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Reward of a response, or of the state that a conversation ended in."""
        given = body.model_dump()
        task = self._task(given)
        answered = self._read(given["response"])
        turns = sum(item.get("type") == "function_call_output" for item in given["response"]["output"])
        if self._environment.begin is None:
            verdict = await self._verified(task, answered)
        else:
            verdict = self._play(request, task).close(self._read(last_turn(given["response"])).response)
        outcome = self._outcome(task, answered, verdict)
        return VerifyResponse(**{**given, **outcome, "tool_outputs": turns})

    async def reset(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """Begin a rollout whose turns are passed to `step`."""
        self._begin(request, body, self._environment)
        return {"observation": None, "info": {}}

    async def step(self, request: Request, body: VerifyRequest) -> dict[str, Any]:
        """The world's reply to one response, and the reward when the conversation is over."""
        given = body.model_dump()
        task = self._task(given)
        answered = self._read(given["response"])
        if self._environment.begin is None:
            verdict: Verdict | None = await self._verified(task, answered)
            outputs, observation = [], ""
        else:
            reply = self._play(request, task).step(answered, given["response"]["id"])
            verdict, observation = reply.verdict, reply.observation
            outputs = [{"call_id": key, "output": text} for key, text in reply.outputs]
        if verdict is None:
            return {"observation": observation or None, "info": {"tool_outputs": outputs}}
        outcome = self._outcome(task, answered, verdict)
        return {"reward": outcome.pop("reward"), "terminated": True, "info": outcome}

    def _begin(self, request: Request, body: Mapping[str, Any], environment: Environment) -> None:
        begin = environment.begin
        if begin is None:
            return
        task = self._task(body)
        reference = self._reference(task)

        def play() -> Play:
            return Play(_identity(task), begin(reference), environment.max_turns)

        try:
            self._plays.begin(request.session[SESSION_ID_KEY], _identity(task), play)
        except NoPlayError as error:
            raise HTTPException(409, str(error)) from None

    def _play(self, request: Request, task: Task) -> Play:
        try:
            return self._plays.get(request.session[SESSION_ID_KEY], _identity(task))
        except NoPlayError as error:
            raise HTTPException(400, str(error)) from None

    def _task(self, row: Mapping[str, Any]) -> Task:
        try:
            return of_gym(row, self.config.environment)
        except (ValueError, LookupError, TypeError) as error:
            raise HTTPException(422, f"{self.config.name}: {error}") from None

    def _read(self, answered: Mapping[str, Any]) -> Answered:
        return read_answer(answered, thinking_opened=self.config.thinking_opened)

    def _reference(self, task: Task) -> Any:
        try:
            return self._references.of(task)
        except ValueError as error:
            raise HTTPException(422, f"{self.config.name}: task {task.id!r}: {error}") from None

    async def _verified(self, task: Task, answered: Answered) -> Verdict:
        verify, reference = self._environment.verify, self._reference(task)
        assert verify is not None
        if answered.unreadable:
            return Verdict.wrong(f"a call cannot be read: {next(iter(answered.unreadable.values()))}"[:300])
        try:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(self._threads, verify, answered.response, reference)
            return await made if inspect.isawaitable(made) else made
        except Exception as error:  # a verifier's own failure must not end a run of many days
            return Verdict.error(f"{type(error).__name__}: {error}"[:300])

    def _outcome(self, task: Task, answered: Answered, verdict: Verdict) -> dict[str, Any]:
        """Reward and metrics of a response."""
        response = answered.response
        if self._reward.counts_tokens and response.tokens is None:
            raise HTTPException(
                500, f"reward {self.config.reward!r} counts tokens, but the model server gives no usage"
            )
        facts = Facts.of(task, thinking_opened=self.config.thinking_opened)
        reward = self._reward.score(verdict, response, facts)
        return {
            "reward": reward.total,
            **{f"reward/{name}": value for name, value in reward.parts.items()},
            "correct": verdict.outcome == "correct",
            "score": verdict.score,
            **failure(verdict.outcome == "error"),
            "verdict": {"outcome": verdict.outcome, "reason": verdict.reason, "answer": verdict.answer},
        }


def failure(failed: bool) -> dict[str, Any]:
    """Fields that mark a failure of the verifier: a number for metrics, and the key that Gym's collection looks for."""
    return {"verifier_error": failed, **({NG_FAILURE_CLASS_KEY: "verifier_error"} if failed else {})}


def _identity(task: Task) -> dict[str, Any]:
    return {"id": task.id, "reference": task.reference}
