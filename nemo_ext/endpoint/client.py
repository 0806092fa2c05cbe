"""Client for an OpenAI-compatible endpoint, with concurrent requests and retries.

A failed, invalid or late answer does not raise an exception but becomes an `Answer` with a `problem`. Two errors end
`Client.answers`, because later requests would fail too: a rejected key (ValueError), and an endpoint that has not
answered for `patience` seconds (`EndpointGone`).
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
"""Maximum wait in seconds that an endpoint's `Retry-After` can request; longer ones are shortened."""
_TO_COME_UP = 60.0
"""Seconds for which `Client.check` waits for an endpoint."""
_RESTING = 4
"""Maximum ratio of requests that wait for a retry to requests in flight."""
_CHARACTERS = 4
"""Approximate number of characters per token, for limits per minute."""
_TOO_LONG = re.compile(
    "context[ _]length|maximum model length|maximum allowed length|input tokens exceed", re.IGNORECASE
)
"""Pattern of the error messages of vLLM, SGLang, OpenAI and `nemo-ext serve` for a request that exceeds the context."""
_SURROGATES = re.compile("[\ud800-\udfff]")


class EndpointGone(OSError):
    """Raised if an endpoint has not answered for longer than `ClientSettings.patience`."""


@pydantic_dataclass(frozen=True, kw_only=True, config=STRICT)
class ClientSettings:
    """Settings for requests to an endpoint.

    Attributes:
        attempts: maximum number of attempts per request.
        attempt_seconds: time limit of one attempt, in seconds.
        patience: seconds for which requests wait while an endpoint is unreachable; with 0, a refused connection is a
            failed attempt like any other.
        concurrency: number of concurrent requests; None adapts it to the endpoint (`Pace`).
        requests_a_minute: maximum number of requests per minute; None if there is no limit.
        tokens_a_minute: maximum number of prompt and answer tokens per minute; None if there is no limit.
        omit: fields omitted from every request because the endpoint rejects them, such as seed.
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
                f"omit={', '.join(sorted(needed))}: every request needs these fields; omit only optional "
                "ones, such as seed"
            )


EMBEDDINGS = "embeddings"
"""Path of requests for the vector of a text, which is the answer as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request to an endpoint.

    Attributes:
        body: JSON object without `model` and `stream`, which the client adds.
        key, sample: name of the row and number of the sample, which only the caller uses.
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
        key, sample: fields of the request.
        answer: text of the answer; "" if the model ended without text, None if there are only tool calls or a problem.
        reasoning: reasoning that the endpoint has separated from the answer; None if there is none.
        tool_calls: tool calls, in the form of OpenAI's `tool_calls`.
        finish_reason: why the answer ended (stop, length, tool_calls ...).
        prompt_tokens, completion_tokens: numbers of tokens; None if the endpoint does not report them.
        seed: seed of the request; None if it has none.
        seconds: duration of the successful attempt in seconds, or of all attempts if none succeeded.
        body: the endpoint's whole response.
        status: HTTP status of the last attempt, or the code of an error in its response; None if there is
            neither.
        problem: why there is no answer; "" if there is one.
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
        """True if the endpoint reports that the prompt and the answer together exceed the model's context length."""
        return self.status == 400 and _TOO_LONG.search(self.problem) is not None


class Store(Protocol):
    """Storage for answers, which lets `Client.answers` skip requests that were answered earlier."""

    def has(self, request: Request) -> bool:
        """True if the request's answer is stored."""

    def add(self, request: Request, answer: Answer) -> None:
        """Store an answer."""


class Client:
    """Client for one endpoint, used in one event loop.

    Within `async with`, connections are reused; outside, each request opens a new one. `max_length` is the model's
    context length that the endpoint reported to `check` (vLLM's max_model_len), or None.

    Args:
        endpoint: an address; or a run directory, file or URL (`read_address`). A file is read again if the endpoint
            does not answer, as an endpoint on a cluster may have moved.
        settings: settings for the requests; None for the defaults.
        model: name of the model; None for the one in the file.
        key_variable: environment variable that holds the key; None for the key in the file.
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
        self.settings = settings = settings or ClientSettings()
        self.pace = Pace(
            fixed=settings.concurrency, requests=settings.requests_a_minute, tokens=settings.tokens_a_minute
        )
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
        """Check that the endpoint serves the model, waiting up to a minute for it; return the names of all its models.

        Raises:
            ValueError: the endpoint is not reachable, rejects the key or does not serve the model.
        """
        end, warned = time.monotonic() + min(_TO_COME_UP, self.settings.patience), False
        while True:
            where = self.address.url
            try:
                lengths = await self._models()
                break
            except Failed as failed:
                why = self._why(failed)
                if not failed.again or time.monotonic() >= end:
                    raise ValueError(
                        f"endpoint {where} cannot be used: {why}"
                        + ("" if failed.status in REFUSED else "; check the URL and the server")
                    ) from None
                if not warned:
                    logging.getLogger(__name__).warning("endpoint %s: %s; retrying for %.0f s", where, why, _TO_COME_UP)
                warned = True
            await asyncio.sleep(_FIRST_WAIT)
            self._find()
        names = list(lengths)
        if not self.address.model and len(names) == 1:
            self.address = replace(self.address, model=names[0])
        if self.address.model not in names:
            model = self.address.model
            raise ValueError(f"endpoint {where}: unknown model {model!r}: {nearest(model, names)}")
        self.max_length = lengths[self.address.model]
        return names

    async def _models(self) -> dict[str, int | None]:
        """Return a mapping from each model at the endpoint to its context length, or None if that is not reported."""
        listed = await self._send("GET", "models", None, min(60.0, self.settings.attempt_seconds))
        try:
            models = body_of(listed, "list of models", self.address.key)["data"]
            return {str(model["id"]): count(model.get("max_model_len")) for model in models}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            words = words_of(listed, self.address.key)
            raise Failed(f"the response to /models is not a list of models: {words}", again=False) from None

    async def answers(
        self, requests: Iterable[Request] | AsyncIterable[Request], *, store: Store | None = None
    ) -> AsyncGenerator[Answer]:
        """Yield answers in the order in which they arrive; requests are consumed as capacity becomes available.

        Args:
            requests: requests, consumed lazily.
            store: storage to which answers are added before they are yielded; stored requests are skipped.

        Raises:
            ValueError: the endpoint rejects the key.
            EndpointGone: the endpoint has not answered for longer than `ClientSettings.patience`.
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
                task = asyncio.create_task(self._stored(request, store))
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
            for pending in (feeding, *running):
                pending.cancel()
            ended = [done.get_nowait() for _ in range(done.qsize())]
            await asyncio.gather(feeding, *running, *filter(None, ended), return_exceptions=True)

    async def _stored(self, request: Request, store: Store | None) -> Answer:
        answer = await self.ask(request)
        if answer.status in REFUSED:
            raise ValueError(f"endpoint {self.address.url} denied access: {answer.problem}")
        if store is not None:
            store.add(request, answer)
        return answer

    async def ask(
        self, request: Request, *, unreadable: Callable[[Answer], str] | None = None, within: float | None = None
    ) -> Answer:
        """Send one request, with retries.

        Args:
            request: the request.
            unreadable: function that returns why an answer is unusable, so that the attempt counts as failed, or "".
            within: seconds for all attempts, including the wait for a slot; None if there is no limit.

        Raises:
            EndpointGone: the endpoint has not answered for longer than `ClientSettings.patience`.
        """
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        if self.settings.omit:
            body = {name: value for name, value in request.body.items() if name not in self.settings.omit}
            request = replace(request, body=body)
        attempts = AsyncRetrying(
            sleep=self._rest,
            stop=stop_after_attempt(self.settings.attempts),
            wait=_wait,
            retry=retry_if_exception(_again),
            reraise=True,
        )
        problem, status, began = "the request was never sent", None, time.monotonic()

        async def attempt() -> Answer:
            nonlocal problem, status
            while True:
                address = self.address
                try:
                    async with self.pace.turn(self._estimate(request)):
                        problem = "the endpoint does not respond"
                        answer = await self._answer(request)
                    break
                except Failed as failed:
                    problem, status = self._why(failed), failed.status
                    if failed.unreached and self.settings.patience:  # not the request's fault
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
        prompt = request.body.get("messages") or request.body.get("prompt") or ""
        return int(len(str(prompt)) / _CHARACTERS + self._mean_tokens)

    async def _answer(self, request: Request) -> Answer:
        payload = {**request.body, "model": self.address.model, "stream": False}
        try:
            body = json.dumps(payload).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise Failed(f"the request cannot be written as JSON: {error}; correct the input", again=False) from None
        began = time.monotonic()
        try:
            content = await self._send("POST", request.path, body, self.settings.attempt_seconds)
            seconds = time.monotonic() - began
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
        """Return why a request failed; for a rejected API key, also where the key comes from."""
        if failed.status not in REFUSED:
            return str(failed)
        place, _, variable = self._again or (None, None, None)
        if self.address.key is None:
            return f"{failed}: no API key was sent; set key_variable to the environment variable that holds it"
        if variable is not None:
            return (
                f"{failed}: the API key in the environment variable {variable} (key_variable) was rejected; correct it"
            )
        return f"{failed}: the API key{f' in {place}' if place else ''} was rejected; use a valid one"

    async def _until_reached(self) -> None:
        """Wait until the endpoint answers again; all waiting requests share one probe."""
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
                    return  # a server answers, even if with an error
                if time.monotonic() - began > self.settings.patience:
                    raise EndpointGone(
                        f"endpoint {self.address.url}: no answer for {self.settings.patience:g} s ({failed}); check "
                        "that the server is running, and its log"
                    ) from None
            await asyncio.sleep(pause)
            pause = min(_LONGEST_WAIT / 3, pause * 2)

    def _find(self) -> None:
        """Read the endpoint's address again if it comes from a file, as the endpoint may have moved."""
        if self._again is not None:
            with contextlib.suppress(ValueError):  # the file may be missing while the endpoint moves
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
            problem = f"{type(error).__name__}: {error}".replace(key or "\0", "***")
            raise Failed(problem, unreached=isinstance(error, aiohttp.ClientConnectorError)) from None
        finally:
            if session is not self._session:
                await session.close()
        status = response.status
        if status == 200:
            return content
        where = f": {self.address.url}/{path}" if status in MISPLACED or 300 <= status < 400 else ""
        if where and (to := response.headers.get("Location", "").partition("?")[0]):
            where += f" redirects to {to}; redirects are not followed: set the endpoint to that address"
        raise Failed.from_response(
            status,
            f"HTTP {status}{where}",
            words_of(content, key),
            after=_retry_after(response.headers.get("Retry-After", "")),
            unreached=AWAY in response.headers,
        )


def _session() -> "aiohttp.ClientSession":
    import aiohttp

    # The client limits time and connections itself; aiohttp's defaults would end attempts too early.
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0))


async def _each(requests: Iterable[Request]) -> AsyncIterator[Request]:
    for request in requests:
        yield request


def _again(error: BaseException) -> bool:
    return isinstance(error, Failed) and error.again


def _wait(state: "RetryCallState") -> float:
    """Return the seconds to wait before a retry: exponential backoff with full jitter, to spread requests over time."""
    from tenacity import wait_random_exponential

    failed = state.outcome.exception() if state.outcome else None
    after = failed.after if isinstance(failed, Failed) else 0.0
    return max(wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT)(state), after)


async def _read(response: "aiohttp.ClientResponse") -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > _MAX_BYTES:
            raise Failed(f"the answer has more than {_MAX_BYTES >> 20} MiB; lower max_tokens", again=False)
    return bytes(content)


def _read_answer(content: bytes, request: Request, seconds: float, key: str | None = None) -> Answer:
    """Read the first choice in a response from `/chat/completions` or `/completions`, or a vector from `/embeddings`.

    Args:
        content: body of the response.
        request: the request.
        seconds: duration of the attempt in seconds.
        key: API key, which is removed from messages.

    Raises:
        Failed: the response is an error, is not a completion, or has an answer that the endpoint aborted.
    """
    try:
        body = body_of(content, "chat completion", key)
        if _SURROGATES.search(again := json.dumps(body, ensure_ascii=False)):  # which cannot be written to a file
            body = json.loads(again.encode(errors="replace"))
        usage = body.get("usage") or {}
        if request.path == EMBEDDINGS:
            vector = json.dumps([float(value) for value in body["data"][0]["embedding"]])
            return Answer(
                key=request.key,
                sample=request.sample,
                answer=vector,
                finish_reason="stop",
                prompt_tokens=count(usage.get("prompt_tokens")),
                seconds=seconds,
                body=body,
            )
        choice = body["choices"][0]
        message = choice.get("message") or {}
        text = message.get("content") if message else choice.get("text")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = tuple(dict(call) for call in message.get("tool_calls") or ())
        prompt_tokens, completion_tokens = (count(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion"))
        ended = choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Failed(f"the response is not a chat completion: {words_of(content, key)}") from None
    reason = str(ended).lower()
    if reason in BROKEN_OFF:
        raise Failed(f"the endpoint aborted the answer (finish_reason: {ended})", overload="resource" in reason)
    if reason in CUT_OFF:
        ended = "length"
    if isinstance(text, list):
        text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
    if text is None and not calls and (reasoning or message.get("refusal") or isinstance(ended, str)):
        # Truncated while thinking, filtered, refused or empty: a retry would bias the sample of answers.
        text = ""
    if not isinstance(text, str) and not (text is None and calls):
        raise Failed("the chat completion has neither text nor tool calls")
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
    """Return a number of tokens reported by an endpoint as an integer; None if the value is not a valid number."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _retry_after(value: str) -> float:
    """Return the wait in seconds that a `Retry-After` header requests (RFC 9110, section 10.2.3); 0 if invalid."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_AFTER) if seconds < float("inf") else 0.0
