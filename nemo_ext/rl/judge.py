"""A judge behind an OpenAI-compatible endpoint: asked many questions concurrently, always within a time limit.

Rules: an answer that does not come, cannot be read or comes too late is `Answer(value=None, problem=...)`, never an
exception; one question, including its wait for a turn and its retries, takes at most `total_seconds`;
cancelling (Ctrl-C) cancels the requests. Each request has a connection of its own, so that a judge works in any event
loop and a balancer in front of several replicas spreads them. The key comes from the environment alone.
"""

import asyncio
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, FiniteFloat, JsonValue, PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass

from nemo_ext.job.settings import checked, nearest

if TYPE_CHECKING:
    import aiohttp
    from tenacity import RetryCallState

Messages = Sequence[Mapping[str, Any]]
Seconds = Annotated[FiniteFloat, Field(gt=0)]

# Status codes worth another attempt: time-outs, conflicts, too many requests, server failures.
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MAX_BYTES = 8 << 20
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class JudgeSettings:
    """Endpoint of the judge and its request settings.

    Attributes:
        base_url: URL up to and including `/v1`.
        model: name of the model at the endpoint.
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

    base_url: str
    model: Annotated[str, Field(min_length=1)]
    key_variable: str | None = None
    sampling: Mapping[str, JsonValue] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 4096})
    attempts: PositiveInt = 3
    attempt_seconds: Seconds = 120.0
    total_seconds: Seconds = 1800.0
    concurrency: PositiveInt = 64

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "JudgeSettings":
        """Settings from a config, whose keys are checked.

        Raises:
            ValueError: naming the key of `judge`, what it holds and what it may hold.
        """
        return checked(cls, config, where="judge", strict=True)

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.username or url.password or url.query:
            raise ValueError("base_url must hold no name, password or query: name the key's variable in key_variable")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url must be like http://localhost:8000/v1, not {self.base_url!r}")
        if taken := {"model", "messages", "stream"} & set(self.sampling):
            raise ValueError(f"sampling must be without {', '.join(sorted(taken))}, which each request sets itself")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise ValueError(f"key_variable: the environment variable {self.key_variable} is not set")


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
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._turns = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Judge"], tuple[JudgeSettings]]:
        return Judge, (self.settings,)

    async def ask[T](self, messages: Messages, read: Callable[[str], T | None]) -> Answer[T]:
        """Ask one question.

        Args:
            messages: chat messages as the endpoint takes them.
            read: parser of the answer's text; if it returns None, the question is asked again like a failed request.
        """
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        settings = self.settings
        attempts = AsyncRetrying(
            stop=stop_after_attempt(settings.attempts), wait=_wait, retry=retry_if_exception(_again), reraise=True
        )
        problem = "its turn never came"

        async def attempt() -> T:
            nonlocal problem
            try:
                async with self._turn():
                    problem = "the endpoint is silent"
                    text = await self._request(messages)
            except _Failed as failed:
                problem = str(failed)
                raise
            value = read(text)
            if value is None:
                problem = "an answer that cannot be read"
                raise _Failed(problem)
            return value

        try:
            async with asyncio.timeout(settings.total_seconds):
                return Answer(value=await attempts(attempt))
        except _Failed as failed:
            return Answer(value=None, problem=str(failed))
        except TimeoutError:
            return Answer(value=None, problem=f"no answer within {settings.total_seconds:g} s: {problem}")

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
        where = f"judge.base_url={self.settings.base_url}"
        try:
            listed = json.loads(await self._send("GET", "models", None))
            names = [str(model["id"]) for model in listed["data"]]
        except _Failed as failed:
            raise ValueError(f"{where}: {failed}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"{where}: /models answers with something else than a list of models") from None
        if self.settings.model not in names:
            raise ValueError(
                f"judge.model: unknown name {self.settings.model!r}: {nearest(self.settings.model, names)}"
            )

    def _turn(self) -> asyncio.Semaphore:
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.settings.concurrency))

    async def _request(self, messages: Messages) -> str:
        payload = {**self.settings.sampling, "model": self.settings.model, "messages": list(messages), "stream": False}
        return _text(await self._send("POST", "chat/completions", json.dumps(payload).encode()))

    async def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        import aiohttp

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        key = os.environ.get(self.settings.key_variable or "", "")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.settings.base_url.rstrip('/')}/{path}"
        # The time limit is ours; aiohttp's own would end an attempt that has longer.
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with (
                asyncio.timeout(self.settings.attempt_seconds),
                session,
                # A redirect would take the key to another host.
                session.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                content = await _read(response)
                if response.status == 200:
                    return content
                raise _Failed(
                    _refusal(response.status, content, key),
                    again=response.status in _AGAIN,
                    after=_retry_after(response.headers.get("Retry-After", "")),
                )
        except TimeoutError:
            raise _Failed(f"no answer within {self.settings.attempt_seconds:g} s") from None
        # Not `repr`: some of these hold the request's headers.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Failed(f"{type(error).__name__}: {error}".replace(key or "\0", "***")) from None


class _Failed(Exception):
    """A failed attempt."""

    def __init__(self, problem: str, *, again: bool = True, after: float = 0.0) -> None:
        super().__init__(problem)
        self.again = again
        self.after = after


def _again(error: BaseException) -> bool:
    return isinstance(error, _Failed) and error.again


def _wait(state: "RetryCallState") -> float:
    """Exponential backoff with full jitter, so that a recovered server is not asked by all at once."""
    from tenacity import wait_random_exponential

    failed = state.outcome.exception() if state.outcome else None
    after = failed.after if isinstance(failed, _Failed) else 0.0
    return max(wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)(state), after)


async def _read(response: "aiohttp.ClientResponse") -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_BYTES:
            raise _Failed(f"an answer of more than {_MAX_BYTES >> 20} MiB", again=False)
    return bytes(content)


def _text(body: bytes) -> str:
    """Text of a chat completion."""
    try:
        choice = json.loads(body)["choices"][0]
        content, ended = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _Failed("an answer that is no chat completion") from None
    # The intended ending is unknown, and the text may have been cut inside a quotation.
    if ended == "length":
        raise _Failed("an answer that was cut off: give it more max_tokens")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise _Failed("a chat completion without text")
    return content


def _refusal(status: int, content: bytes, key: str) -> str:
    problem = f"HTTP {status}"
    # A server's message about a bad key may contain part of it.
    if status in (401, 403):
        return problem
    said = " ".join(content.decode(errors="replace").split())
    if key:
        said = said.replace(key, "***")
    return f"{problem}: {said[:200]}" if said else problem


def _retry_after(value: str) -> float:
    """Seconds that a `Retry-After` header asks for: a number, or a date (RFC 9110, section 10.2.3); 0 for others."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return max(seconds, 0.0) if seconds < float("inf") else 0.0
