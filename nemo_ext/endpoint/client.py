"""Requests to an OpenAI-compatible endpoint: many at a time, tried again where that can help, never an exception.

An answer that does not come, cannot be read or comes too late is an `Answer` with a `problem`. Two things end many
requests (`Client.answers`) instead, as no later one could go better: a refused key (ValueError), and an endpoint at
which nobody has answered for `patience` seconds (`EndpointGone`).
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field, FiniteFloat, PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass

from nemo_ext.endpoint.address import AWAY, Address, read_address
from nemo_ext.endpoint.failures import BROKEN_OFF, CUT_OFF, MISPLACED, REFUSED, Failed, body_of, words_of
from nemo_ext.endpoint.pace import Pace
from nemo_ext.job.settings import STRICT, StringsOrNone, nearest

if TYPE_CHECKING:
    import aiohttp
    from tenacity import RetryCallState

Seconds = Annotated[FiniteFloat, Field(gt=0)]
SecondsOrNone = Annotated[FiniteFloat, Field(ge=0)]

_MAX_BYTES = 64 << 20
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_LONGEST_AFTER = 600.0
"""Most seconds that an endpoint's `Retry-After` is heeded for."""
_TO_COME_UP = 60.0
"""Seconds for which the first look at an endpoint waits for it."""
_RESTING = 4
"""Most requests that wait for another attempt, for each one that has a turn."""
_CHARACTERS = 4
"""Characters of a token, roughly, for limits per minute."""
_TOO_LONG = re.compile(
    "context[ _]length|maximum model length|maximum allowed length|input tokens exceed", re.IGNORECASE
)
"""What vLLM, SGLang, OpenAI and `nemo-ext serve` say of a request that their model is too short for."""


class EndpointGone(OSError):
    """Nobody has answered at the endpoint for longer than the client's patience."""


@pydantic_dataclass(frozen=True, kw_only=True, config=STRICT)
class ClientSettings:
    """How an endpoint is asked.

    Attributes:
        attempts: most attempts per request.
        attempt_seconds: time limit of one attempt.
        patience: seconds for which an endpoint may be away altogether, while requests wait; 0: not to be reached is a
            failed attempt like others.
        concurrency: number of requests at a time; None finds it (`Pace`).
        requests_a_minute: most requests a minute; None for any.
        tokens_a_minute: most tokens a minute, of prompts and answers; None for any.
        omit: fields left out of every request, which the endpoint refuses: seed, for one.
    """

    attempts: PositiveInt = 10
    attempt_seconds: Seconds = 3600.0
    patience: SecondsOrNone = 1800.0
    concurrency: PositiveInt | None = None
    requests_a_minute: PositiveInt | None = None
    tokens_a_minute: PositiveInt | None = None
    omit: StringsOrNone = ()

    def __post_init__(self) -> None:
        if needed := {"model", "messages", "prompt"} & set(self.omit):
            raise ValueError(
                f"omit={', '.join(sorted(needed))}: no request is without: name other fields, such as seed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        body: JSON object without `model` and `stream`, which the client adds.
        key, sample: name of the row it belongs to and number of the sample, for the caller alone.
        path: path below `/v1`.
    """

    body: Mapping[str, Any]
    key: str = ""
    sample: int = 0
    path: str = "chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Outcome of one request.

    Attributes:
        key, sample: those of the request.
        answer: text of the answer, "" where the model ended without one; None beside calls alone, or after a problem.
        reasoning: text before it that the endpoint has told apart; None if there is none.
        tool_calls: calls as OpenAI's `tool_calls`.
        finish_reason: why the answer ended (stop, length, tool_calls ...).
        prompt_tokens, completion_tokens: numbers of tokens; None where the endpoint does not count.
        seed: seed of the request; None if it had none.
        seconds: seconds of the attempt that succeeded, or of all attempts.
        body: the endpoint's whole response.
        status: HTTP status of the last attempt, or the code of an error in its response; None without either.
        problem: reason why there is no answer; "" if there is one.
    """

    key: str = ""
    sample: int = 0
    answer: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seed: int | None = None
    seconds: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    status: int | None = None
    problem: str = ""

    @property
    def too_long(self) -> bool:
        """True if prompt and answer together are longer than the model takes, by the endpoint's words."""
        return self.status == 400 and _TOO_LONG.search(self.problem) is not None


class Store(Protocol):
    """Where answers are kept."""

    def has(self, request: Request) -> bool:
        """True if the request's answer is there already."""

    def add(self, request: Request, answer: Answer) -> None:
        """Keep an answer."""


class Client:
    """Client of one endpoint, for one event loop.

    Within `async with` connections are kept for the next requests; outside each request has one of its own.
    `max_length` is the number of tokens that the model takes, as `check` was told (vLLM's max_model_len), else None.

    Args:
        endpoint: an address; or a run directory, file or URL (`read_address`). A file is read again when nobody
            answers, as an endpoint on a cluster may have moved.
        model: see `read_address`.
        key_variable: see `read_address`.
    """

    def __init__(
        self,
        endpoint: Address | str | Path,
        settings: ClientSettings | None = None,
        *,
        model: str | None = None,
        key_variable: str | None = None,
    ) -> None:
        self.address = endpoint if isinstance(endpoint, Address) else read_address(endpoint, model, key_variable)
        self._again = None if isinstance(endpoint, Address) else (endpoint, model, key_variable)
        self.settings = given = settings or ClientSettings()
        self.pace = Pace(fixed=given.concurrency, requests=given.requests_a_minute, tokens=given.tokens_a_minute)
        self.max_length: int | None = None
        self._session: aiohttp.ClientSession | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._mean_tokens = 0.0
        self._resting = 0

    async def __aenter__(self) -> "Client":
        self._session = _session()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def check(self) -> list[str]:
        """Names of the models that the endpoint serves; checks that ours is one. It has a minute to come up.

        Raises:
            ValueError: saying what is wrong.
        """
        end, said = time.monotonic() + min(_TO_COME_UP, self.settings.patience), False
        while True:
            where = self.address.url
            try:
                lengths = await self._models()
                break
            except Failed as failed:
                why = self._why(failed)
                if not failed.again or time.monotonic() >= end:
                    raise ValueError(f"{where}: {why}") from None
                if not said:
                    logging.getLogger(__name__).warning("%s: %s; trying for %.0f s", where, why, _TO_COME_UP)
                said = True
            await asyncio.sleep(_FIRST_WAIT)
            self._find()
        names = list(lengths)
        if not self.address.model and len(names) == 1:
            self.address = replace(self.address, model=names[0])
        if self.address.model not in names:
            raise ValueError(f"{where}: unknown model {self.address.model!r}: {nearest(self.address.model, names)}")
        self.max_length = lengths[self.address.model]
        return names

    async def _models(self) -> dict[str, int | None]:
        """Lengths of the endpoint's models by name; None where it does not say it."""
        listed = await self._send("GET", "models", None, min(60.0, self.settings.attempt_seconds))
        try:
            models = body_of(listed, "list of models", self.address.key)["data"]
            return {str(model["id"]): count(model.get("max_model_len")) for model in models}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            said = words_of(listed, self.address.key)
            raise Failed(f"/models answers with something else than a list of models: {said}", again=False) from None

    async def answers(
        self, requests: Iterable[Request] | AsyncIterable[Request], *, store: Store | None = None
    ) -> AsyncGenerator[Answer]:
        """Answers in the order in which they come; requests are taken as there are turns for them.

        Args:
            requests: requests, made when they are wanted.
            store: where answers are kept before they are given out; what it has is not asked again.

        Raises:
            ValueError: the endpoint refuses the key.
            EndpointGone: see `ClientSettings.patience`.
        """
        source = requests if isinstance(requests, AsyncIterable) else _each(requests)
        done: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue()
        running: set[asyncio.Task[Answer]] = set()
        room = asyncio.Event()

        def finished(task: asyncio.Task[Answer]) -> None:
            running.discard(task)
            done.put_nowait(task)
            room.set()

        async def feed() -> None:
            async for request in source:
                if store is not None and store.has(request):
                    continue
                while len(running) + done.qsize() >= self.pace.limit + min(self._resting, _RESTING * self.pace.limit):
                    room.clear()
                    await room.wait()
                task = asyncio.create_task(self._kept(request, store))
                running.add(task)
                task.add_done_callback(finished)

        feeding = asyncio.create_task(feed())
        feeding.add_done_callback(lambda _: done.put_nowait(None))
        try:
            while not (feeding.done() and not running and done.empty()):
                task = await done.get()
                room.set()
                if task is not None:
                    yield task.result()
                elif feeding.exception() is not None:
                    feeding.result()
        finally:
            for left in (feeding, *running):
                left.cancel()
            ended = [done.get_nowait() for _ in range(done.qsize())]
            await asyncio.gather(feeding, *running, *filter(None, ended), return_exceptions=True)

    async def _kept(self, request: Request, store: Store | None) -> Answer:
        answer = await self.ask(request)
        if answer.status in REFUSED:
            raise ValueError(f"{self.address.url}: {answer.problem}")
        if store is not None:
            store.add(request, answer)
        return answer

    async def ask(
        self, request: Request, *, unreadable: Callable[[Answer], str] | None = None, within: float | None = None
    ) -> Answer:
        """Ask one question.

        Args:
            request: the request.
            unreadable: says why an answer is of no use, "" if it is; without use it counts as a failed attempt.
            within: seconds for all attempts and the wait for a turn; None for any.

        Raises:
            EndpointGone: see `ClientSettings.patience`.
        """
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        if self.settings.omit:
            kept = {name: value for name, value in request.body.items() if name not in self.settings.omit}
            request = replace(request, body=kept)
        attempts = AsyncRetrying(
            sleep=self._rest,
            stop=stop_after_attempt(self.settings.attempts),
            wait=_wait,
            retry=retry_if_exception(_again),
            reraise=True,
        )
        problem, status, began = "its turn never came", None, time.monotonic()

        async def attempt() -> Answer:
            nonlocal problem, status
            while True:
                address = self.address
                try:
                    async with self.pace.turn(self._estimate(request)):
                        problem = "the endpoint is silent"
                        answer = await self._answer(request)
                    break
                except Failed as failed:
                    problem, status = self._why(failed), failed.status
                    if failed.unreached and self.settings.patience:  # no fault of the request's
                        await self._rest(_FIRST_WAIT)
                        await self._until_reached()
                        continue
                    if failed.status in REFUSED:
                        self._find()
                        if self.address != address:  # a new server has a new key
                            continue
                    raise
            if unreadable is not None and (problem := unreadable(answer)):
                raise Failed(problem)
            return answer

        try:
            async with asyncio.timeout(within):
                return await attempts(attempt)
        except Failed:
            pass
        except TimeoutError:
            problem = f"no answer within {within:g} s: {problem}"
        elapsed = time.monotonic() - began
        return Answer(
            key=request.key,
            sample=request.sample,
            seed=request.body.get("seed"),
            seconds=elapsed,
            status=status,
            problem=problem,
        )

    async def _rest(self, seconds: float) -> None:
        self._resting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._resting -= 1

    def _estimate(self, request: Request) -> int:
        if self.settings.tokens_a_minute is None:
            return 0
        asked = request.body.get("messages") or request.body.get("prompt") or ""
        return int(len(str(asked)) / _CHARACTERS + self._mean_tokens)

    async def _answer(self, request: Request) -> Answer:
        payload = {**request.body, "model": self.address.model, "stream": False}
        try:
            body = json.dumps(payload).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise Failed(f"the request is no JSON: {error}", again=False) from None
        asked = time.monotonic()
        try:
            content = await self._send("POST", request.path, body, self.settings.attempt_seconds)
            seconds = time.monotonic() - asked
            answer = _read_answer(content, request, seconds, self.address.key)
        except Failed as failed:
            if failed.overload:
                self.pace.overloaded()
            raise
        self.pace.answered(seconds)
        if self.settings.tokens_a_minute is not None and answer.completion_tokens is not None:
            used = (answer.prompt_tokens or 0) + answer.completion_tokens
            await self.pace.used(used - self._estimate(request))
            self._mean_tokens += 0.05 * (answer.completion_tokens - self._mean_tokens)
        return answer

    def _why(self, failed: "Failed") -> str:
        """Reason of a failure; for a refused key with the place it comes from."""
        if failed.status not in REFUSED:
            return str(failed)
        place, _, variable = self._again or (None, None, None)
        if self.address.key is None:
            origin = ": none was sent: key_variable=NAME names the environment variable that holds it"
        elif variable is not None:
            origin = f": it comes from the environment variable {variable} (key_variable)"
        else:
            origin = f": it comes from {place}" if place else ""
        return f"{failed}: the key is refused{origin}"

    async def _until_reached(self) -> None:
        """Waits until the endpoint answers again; all requests wait for the same look at it."""
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._look())
        await asyncio.shield(self._waiting)

    async def _look(self) -> None:
        began, pause = time.monotonic(), _FIRST_WAIT
        while True:
            self._find()
            try:
                await self._models()
                return
            except Failed as failed:
                if not failed.unreached:
                    return  # somebody answers, if not to this
                if time.monotonic() - began > self.settings.patience:
                    raise EndpointGone(
                        f"{self.address.url}: no answer for {self.settings.patience:g} s: {failed}"
                    ) from None
            await asyncio.sleep(pause)
            pause = min(_LONGEST_WAIT / 3, pause * 2)

    def _find(self) -> None:
        """Reads the address again, if it is a file's."""
        if self._again is not None:
            with contextlib.suppress(ValueError):  # while it moves
                moved = read_address(*self._again)
                self.address = replace(moved, model=moved.model or self.address.model)

    async def _send(self, method: str, path: str, body: bytes | None, seconds: float) -> bytes:
        import aiohttp

        key = self.address.key or ""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        session = self._session or _session()
        try:
            async with (
                asyncio.timeout(seconds),
                # A redirect would take the key to another host.
                session.request(
                    method, f"{self.address.url}/{path}", data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                content = await _read(response)
        except TimeoutError:
            raise Failed(f"no answer within {seconds:g} s", overload=True) from None
        # Not `repr`: some of these hold the request's headers.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}".replace(key or "\0", "***")
            raise Failed(said, unreached=isinstance(error, aiohttp.ClientConnectorError)) from None
        finally:
            if session is not self._session:
                await session.close()
        status = response.status
        if status == 200:
            return content
        where = f": {self.address.url}/{path}" if status in MISPLACED or 300 <= status < 400 else ""
        if where and (to := response.headers.get("Location", "").partition("?")[0]):
            where += f" leads to {to}: no redirect is followed: name that address as the endpoint"
        raise Failed.of(
            status,
            f"HTTP {status}{where}",
            words_of(content, key),
            after=_retry_after(response.headers.get("Retry-After", "")),
            unreached=AWAY in response.headers,
        )


def _session() -> "aiohttp.ClientSession":
    import aiohttp

    # Limits of time and number are ours; aiohttp's own would end an attempt that has longer.
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0))


async def _each(requests: Iterable[Request]) -> AsyncIterator[Request]:
    for request in requests:
        yield request


def _again(error: BaseException) -> bool:
    return isinstance(error, Failed) and error.again


def _wait(state: "RetryCallState") -> float:
    """Exponential backoff with full jitter, so that a recovered server is not asked by all at once."""
    from tenacity import wait_random_exponential

    failed = state.outcome.exception() if state.outcome else None
    after = failed.after if isinstance(failed, Failed) else 0.0
    return max(wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)(state), after)


async def _read(response: "aiohttp.ClientResponse") -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_BYTES:
            raise Failed(f"an answer of more than {_MAX_BYTES >> 20} MiB", again=False)
    return bytes(content)


def _read_answer(content: bytes, request: Request, seconds: float, key: str | None = None) -> Answer:
    """The answer in a response of `/chat/completions` or `/completions`: its first choice."""
    try:
        body = body_of(content, "chat completion", key)
        if not _is_whole(again := json.dumps(body, ensure_ascii=False)):
            body = json.loads(again.encode(errors="replace"))
        choice, usage = body["choices"][0], body.get("usage") or {}
        message = choice.get("message") or {}
        text = message.get("content") if message else choice.get("text")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = tuple(dict(call) for call in message.get("tool_calls") or ())
        prompt_tokens, completion_tokens = (count(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion"))
        ended = choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Failed(f"an answer that is no chat completion: {words_of(content, key)}") from None
    reason = str(ended).lower()
    if reason in BROKEN_OFF:
        raise Failed(f"the endpoint broke the answer off (finish_reason: {ended})", overload="resource" in reason)
    if reason in CUT_OFF:
        ended = "length"
    if isinstance(text, list):
        text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
    if text is None and not calls and (reasoning or message.get("refusal") or isinstance(ended, str)):
        # Cut off while thinking, filtered, refused or ended at once: another attempt would choose among answers.
        text = ""
    if not isinstance(text, str) and not (text is None and calls):
        raise Failed("a chat completion without text")
    return Answer(
        key=request.key,
        sample=request.sample,
        answer=text,
        reasoning=reasoning if isinstance(reasoning, str) else None,
        tool_calls=calls,
        finish_reason=ended if isinstance(ended, str) else None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        seed=request.body.get("seed"),
        seconds=seconds,
        body=body,
        status=200,
    )


def count(value: object) -> int | None:
    """A number of tokens that an endpoint says; None for what is none."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _is_whole(text: str) -> bool:
    """True if there is no half of a character in it, which no file could keep."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _retry_after(value: str) -> float:
    """Seconds that a `Retry-After` header asks for: a number, or a date (RFC 9110, section 10.2.3); 0 for others."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_AFTER) if seconds < float("inf") else 0.0
