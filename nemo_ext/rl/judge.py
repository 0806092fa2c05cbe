"""Client for a judge behind an OpenAI-compatible endpoint: concurrent questions, each with a time limit.

A missing, malformed or late answer is `Answer(value=None, problem=...)`, never an exception. A question takes at most
`total_seconds`, including its time in the queue and its retries. Ctrl-C cancels the requests. Each request uses its own
connection, so a judge works in any event loop and a load balancer can spread requests over replicas. The API key is
only read from the environment.
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
"""Seconds that the check at the start of a run waits for a run directory's endpoint."""


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class JudgeSettings:
    """Endpoint of the judge and its request settings.

    Attributes:
        endpoint: URL up to and including `/v1`, or the run directory of `nemo-ext serve`.
        model: name of the model at the endpoint; None for the run directory's model.
        key_variable: environment variable that holds the API key; None if the endpoint needs no key.
        sampling: other request fields (temperature, top_p, max_tokens, chat_template_kwargs).
        attempts: maximum number of attempts per question.
        attempt_seconds: time limit of one attempt, in seconds.
        total_seconds: time limit of a question, including its time in the queue. The last of n questions takes about
            n / concurrency times as long as one: 1280 s for 128 prompts x 32 comparisons of 20 s at concurrency 64.
        concurrency: maximum number of concurrent requests per event loop; the default of 64 is NeMo Gym's.

    Raises:
        ValueError: a setting is invalid; the message names it.
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
                raise ValueError(f"endpoint is not a valid URL; {error}") from None
            if self.model is None:
                raise ValueError(f"model is missing; set it to the name of the model at {self.endpoint}")
        if taken := {"model", "messages", "stream"} & set(self.sampling):
            raise ValueError(
                f"sampling must not contain {', '.join(sorted(taken))}, which the judge's requests set; remove it"
            )
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise ValueError(
                f"key_variable: {self.key_variable} is not set in the environment; export the API key in it"
            )

    @property
    def is_url(self) -> bool:
        """True for a URL, False for a run directory."""
        return "://" in self.endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer[T]:
    """Outcome of one question.

    Attributes:
        value: parsed answer; None if there is none.
        problem: reason why the value is missing; "" if it is there.
    """

    value: T | None
    problem: str = ""


class Judge:
    """Client that sends questions to a judge model; picklable and usable from several event loops."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Judge"], tuple[JudgeSettings]]:
        return Judge, (self.settings,)

    async def ask[T](self, messages: Messages, read: Callable[[str], T | None]) -> Answer[T]:
        """Ask one question.

        Args:
            messages: chat messages in the endpoint's format.
            read: function that parses the answer's text; if it returns None, the question is retried.
        """
        value: T | None = None

        def unreadable(answer: client.Answer) -> str:
            nonlocal value
            # The verdict may be missing, and the text may end inside a quotation.
            if answer.finish_reason == "length":
                return "an answer that was cut off; raise max_tokens"
            if not answer.answer:
                return "a chat completion without text"
            value = read(answer.answer)
            return f"an answer that cannot be read: {answer.answer[:100]!r}" if value is None else ""

        request = client.Request(body={**self.settings.sampling, "messages": list(messages)})
        try:
            connection, waited = await self._connect(self.settings.total_seconds)
        except ValueError as error:
            return Answer(value=None, problem=str(error))
        within = max(0.1, self.settings.total_seconds - waited)
        answer = await connection.ask(request, unreadable=unreadable, within=within)
        return Answer(value=None if answer.problem else value, problem=answer.problem)

    async def ask_all[T](self, questions: Iterable[Messages], read: Callable[[str], T | None]) -> list[Answer[T]]:
        """Ask many questions concurrently and return their answers in the same order, within `total_seconds`."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.ask(question, read)) for question in questions]
        return [task.result() for task in tasks]

    async def check(self) -> None:
        """Raise ValueError if the endpoint cannot be reached or serves a different model; called when a run starts."""
        try:
            await (await self._connect(min(_TO_COME_UP, self.settings.total_seconds)))[0].check()
        except ValueError as error:
            raise ValueError(f"judge.endpoint cannot be used; check that its server is up ({error})") from None

    async def _connect(self, seconds: float) -> tuple[Client, float]:
        """Return a client and the seconds waited for it; a run directory has no endpoint while its server restarts.

        Raises:
            ValueError: the endpoint did not appear within `seconds`.
        """
        waited = 0.0
        while True:
            try:
                return self._client(), waited
            except ValueError as error:
                if self.settings.is_url or not Path(self.settings.endpoint).expanduser().is_dir():
                    raise ValueError(
                        f"{error}; the judge's endpoint must be a run directory of `nemo-ext serve`, or a URL that "
                        "begins with http://"
                    ) from None
                if waited >= seconds:
                    raise
                pause = min(1.0, seconds - waited)
                await asyncio.sleep(pause)
                waited += pause

    def _client(self) -> Client:
        settings = self.settings
        return self._clients.setdefault(
            asyncio.get_running_loop(),
            Client(
                settings.endpoint,
                ClientSettings(
                    attempts=settings.attempts,
                    attempt_seconds=settings.attempt_seconds,
                    patience=0 if settings.is_url else settings.total_seconds,
                    concurrency=settings.concurrency,
                ),
                model=settings.model,
                key_variable=settings.key_variable,
            ),
        )
