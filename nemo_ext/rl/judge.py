"""A judge behind an OpenAI-compatible endpoint: asked many questions concurrently, always within a time limit.

Rules: an answer that does not come, cannot be read or comes too late is `Answer(value=None, problem=...)`, never an
exception; one question, including its wait for a turn and its retries, takes at most `total_seconds`;
cancelling (Ctrl-C) cancels the requests. Each request has a connection of its own, so that a judge works in any event
loop and a balancer in front of several replicas spreads them. The key comes from the environment alone.
"""

import asyncio
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass

from nemo_ext.endpoint import client
from nemo_ext.endpoint.address import Address
from nemo_ext.endpoint.client import Client, ClientSettings, Seconds
from nemo_ext.job.settings import Place

Messages = Sequence[Mapping[str, Any]]
_TO_COME_UP = 60.0
"""Seconds for which the first look at a run directory waits for its endpoint."""


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class JudgeSettings:
    """Endpoint of the judge and its request settings.

    Attributes:
        endpoint: URL up to and including `/v1`; or the run directory of `nemo-ext serve`.
        model: name of the model at the endpoint; None for that of the run directory.
        key_variable: environment variable that holds the API key; None if the endpoint needs none.
        sampling: other fields of the request (temperature, top_p, max_tokens, chat_template_kwargs).
        attempts: maximum number of attempts per question.
        attempt_seconds: time limit of one attempt.
        total_seconds: limit for all attempts and the wait for a turn: so more than the questions asked at once, over
            `concurrency`, times the seconds that one takes. 128 prompts x 32 comparisons of 20 s want 1280 s at 64.
        concurrency: number of concurrent requests from one event loop; 64 as in NeMo Gym.

    Raises:
        ValueError: naming the setting.
    """

    endpoint: Annotated[Place, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)] | None = None
    key_variable: str | None = None
    sampling: Mapping[str, JsonValue] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 4096})
    attempts: PositiveInt = 3
    attempt_seconds: Seconds = 120.0
    total_seconds: Seconds = 1800.0
    concurrency: PositiveInt = 64

    def __post_init__(self) -> None:
        if self.is_url:
            try:
                Address(url=self.endpoint)
            except ValueError as error:
                raise ValueError(f"endpoint: {error}") from None
            if self.model is None:
                raise ValueError(f"model is missing: the name of the model at {self.endpoint}")
        if taken := {"model", "messages", "stream"} & set(self.sampling):
            raise ValueError(f"sampling must be without {', '.join(sorted(taken))}, which each request sets itself")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise ValueError(f"key_variable: the environment variable {self.key_variable} is not set")

    @property
    def is_url(self) -> bool:
        """True for a URL, False for a run directory."""
        return "://" in self.endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer[T]:
    """Outcome of one question.

    Attributes:
        value: parsed answer; None if there is none.
        problem: reason why there is no value; "" if there is one.
    """

    value: T | None
    problem: str = ""


class Judge:
    """Client of a judge. Picklable, and may be used from several event loops."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Judge"], tuple[JudgeSettings]]:
        return Judge, (self.settings,)

    async def ask[T](self, messages: Messages, read: Callable[[str], T | None]) -> Answer[T]:
        """Ask one question.

        Args:
            messages: chat messages as the endpoint takes them.
            read: parser of the answer's text; if it returns None, the question is asked again like a failed request.
        """
        value: T | None = None

        def unreadable(answer: client.Answer) -> str:
            nonlocal value
            # The intended ending is unknown, and the text may have been cut inside a quotation.
            if answer.finish_reason == "length":
                return "an answer that was cut off: give it more max_tokens"
            if not answer.answer:
                return "a chat completion without text"
            value = read(answer.answer)
            return f"an answer that cannot be read: {answer.answer[:100]!r}" if value is None else ""

        request = client.Request(body={**self.settings.sampling, "messages": list(messages)})
        try:
            found, waited = await self._found(self.settings.total_seconds)
        except ValueError as error:
            return Answer(value=None, problem=str(error))
        within = max(0.1, self.settings.total_seconds - waited)
        answer = await found.ask(request, unreadable=unreadable, within=within)
        return Answer(value=None if answer.problem else value, problem=answer.problem)

    async def ask_all[T](self, questions: Iterable[Messages], read: Callable[[str], T | None]) -> list[Answer[T]]:
        """Ask many questions concurrently; returns their answers in the same order, all within `total_seconds`."""
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self.ask(question, read)) for question in questions]
        return [task.result() for task in asked]

    async def check(self) -> None:
        """Check that the endpoint can be reached and serves the model; called when a run starts.

        Raises:
            ValueError: saying what is wrong.
        """
        try:
            await (await self._found(min(_TO_COME_UP, self.settings.total_seconds)))[0].check()
        except ValueError as error:
            raise ValueError(f"judge.endpoint={error}") from None

    async def _found(self, seconds: float) -> tuple[Client, float]:
        """The client, and the seconds waited for it: a run directory may have no endpoint while its server moves.

        Raises:
            ValueError: it has none within these seconds.
        """
        waited = 0.0
        while True:
            try:
                return self._client(), waited
            except ValueError as error:
                if self.settings.is_url or not Path(self.settings.endpoint).expanduser().is_dir():
                    raise ValueError(f"{error} (a URL begins with http://)") from None
                if waited >= seconds:
                    raise
                pause = min(1.0, seconds - waited)
                await asyncio.sleep(pause)
                waited += pause

    def _client(self) -> Client:
        given = self.settings
        return self._clients.setdefault(
            asyncio.get_running_loop(),
            Client(
                given.endpoint,
                ClientSettings(
                    attempts=given.attempts,
                    attempt_seconds=given.attempt_seconds,
                    patience=0 if given.is_url else given.total_seconds,
                    concurrency=given.concurrency,
                ),
                model=given.model,
                key_variable=given.key_variable,
            ),
        )
