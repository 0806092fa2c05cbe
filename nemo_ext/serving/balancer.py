"""Load balancer for replicas: a request goes to the replica with the fewest requests, and on failure to another one.

A replica is used as long as it answers and its `endpoint.json` is touched; idle replicas are probed every few seconds
with a request for one token. If a replica is lost before it starts to answer, the request goes to another replica.
Streams are forwarded as they arrive. The balancer sets no time limits on requests.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from nemo_ext.endpoint.address import AWAY, Address
from nemo_ext.serving.guard import Guard, gone, metrics_page, refusal
from nemo_ext.serving.members import Watch

if TYPE_CHECKING:
    import aiohttp

_LOOK = 1.0
_PROBE_EVERY, _PROBE_WAIT, _SILENT = 5.0, 30.0, 60.0
"""Seconds between probes, until a probe times out, and without an answer until a replica is considered down."""
_ELSEWHERE = frozenset({500, 502, 503})
"""Status codes after which a request goes to another replica."""
_OF_ONE_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade", "te"})


@dataclass(eq=False)
class Member:
    """State of a replica.

    Attributes:
        name: name of the replica.
        address: address of the replica.
        up: whether it answers.
        asked: number of its requests in progress.
        answered: time of its last answer, by `time.monotonic`.
        lost: event that is set when the replica is gone, so that requests stop waiting for it.
    """

    name: str
    address: Address
    up: bool = False
    asked: int = 0
    answered: float = 0.0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class _Elsewhere(Exception):
    """Raised if a replica fails before it starts to answer."""


class _Left(Exception):
    """Raised if the client has disconnected and no longer needs a response."""


class Balancer:
    """Load balancer for a run's replicas."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.members: dict[str, Member] = {}
        self._session: aiohttp.ClientSession | None = None
        self._probes: dict[Member, asyncio.Task[None]] = {}
        self._probed: dict[Member, float] = {}
        self.registry = registry = CollectorRegistry()
        self._outcomes = Counter("balancer_requests", "Requests by outcome.", ["replica", "outcome"], registry=registry)
        self._asked = Gauge("balancer_requests_running", "Requests in progress.", ["replica"], registry=registry)
        Gauge("balancer_replicas_up", "Replicas that answer.", registry=registry).set_function(lambda: self.up)

    @property
    def up(self) -> int:
        """Number of replicas that answer."""
        return sum(member.up for member in self.members.values())

    def app(self, key: str | None) -> Starlette:
        """Create the application; every route except /health requires the key, if there is one."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/{path:path}", self._pass, methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes)
        app.add_middleware(Guard, key=key)
        return app

    async def keep(self) -> None:
        """Monitor which replicas exist and answer, until cancelled."""
        import aiohttp

        # The client sets the time limits.
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10), connector=aiohttp.TCPConnector(limit=0)
        ) as self._session:
            try:
                while True:
                    self._compare(self.watch.living())
                    await asyncio.sleep(_LOOK)
            finally:
                for probe in self._probes.values():
                    probe.cancel()

    def _compare(self, living: Mapping[str, Address]) -> None:
        for name, member in list(self.members.items()):
            if living.get(name) != member.address:
                member.up = False
                member.lost.set()
                del self.members[name]
        for name, address in living.items():
            self.members.setdefault(name, Member(name, address))
        now = time.monotonic()
        for member in self.members.values():
            probing = member in self._probes and not self._probes[member].done()
            quiet = now - max(member.answered, self._probed.get(member, 0.0)) > (_PROBE_EVERY if member.up else _LOOK)
            if quiet and not probing:
                self._probed[member] = now
                self._probes[member] = asyncio.create_task(self._probe(member))
        for member in set(self._probes) - set(self.members.values()):
            self._probes.pop(member).cancel()
            self._probed.pop(member, None)

    async def _probe(self, member: Member) -> None:
        """Test a replica by requesting one token, as /health may return 200 although the engine is dead."""
        assert self._session is not None
        body = {"model": member.address.model, "prompt": "a", "max_tokens": 1}
        try:
            async with (
                asyncio.timeout(_PROBE_WAIT),
                self._session.post(
                    f"{member.address.url}/completions", json=body, headers=_key(member.address)
                ) as response,
            ):
                await response.read()
            if response.status == 200:
                member.up, member.answered = True, time.monotonic()
            elif response.status != 429:
                member.up = False
        except TimeoutError:
            # A replica with a long queue is slow, but answers other requests meanwhile.
            member.up = member.up and time.monotonic() - member.answered < _SILENT
        except Exception:  # any error means that the replica does not answer
            member.up = False

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.up else 503)

    async def _metrics(self, request: Request) -> Response:
        return metrics_page(self.registry)

    async def _pass(self, request: Request) -> Response:
        """Forward a request to one replica after another until one starts to answer, and return its response."""
        body = await request.body()
        tried: set[Member] = set()
        last = refusal(503, "no replica is up yet: try again later")
        last.headers[AWAY] = "1"
        while True:
            candidates = [member for member in self.members.values() if member.up and member not in tried]
            if not candidates:
                last.headers.setdefault("Retry-After", "5")
                return last
            member = min(candidates, key=lambda candidate: candidate.asked)
            tried.add(member)
            try:
                response = await self._ask(member, request, body)
            except _Left:
                return Response(status_code=499)
            except _Elsewhere as error:
                self._outcomes.labels(member.name, "elsewhere").inc()
                last = refusal(502, f"no replica answered ({error}): try again")
                continue
            # A request that fails on two engines would fail on all.
            if response.status_code not in _ELSEWHERE or (response.status_code == 500 and len(tried) > 1):
                return response
            last = response

    async def _ask(self, member: Member, request: Request, body: bytes) -> Response:
        """Send a request to a replica, and return the response; a stream continues after the return.

        Raises _Elsewhere if the replica failed before it answered.
        """
        import aiohttp

        assert self._session is not None
        headers = {
            name: value for name, value in request.headers.items() if name not in (*_OF_ONE_HOP, "authorization")
        }
        where = f"{member.address.url}/{request.path_params['path']}"
        asking = asyncio.create_task(
            self._session.request(
                request.method,
                f"{where}?{request.url.query}" if request.url.query else where,
                data=body,
                headers=headers | _key(member.address),
                allow_redirects=False,
            )
        )
        member.asked += 1
        self._asked.labels(member.name).inc()
        streaming = False
        try:
            answer = await self._unless(asking, member, request)
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_HOP}
            if answer.content_type == "text/event-stream":
                streaming = True
                return StreamingResponse(self._stream(answer, member), answer.status, headers)
            # Read completely before forwarding, so that a partial answer is requested again.
            content = await self._unless(asyncio.create_task(answer.read()), member, request)
            headers.pop("Content-Encoding", None)
            self._answered(member, answer.status)
            return Response(content, answer.status, headers)
        except (aiohttp.ClientError, OSError) as error:
            member.up = False
            raise _Elsewhere(f"replica {member.name}: {type(error).__name__}") from None
        finally:
            if not streaming:
                self._done(member)

    async def _unless[T](self, task: asyncio.Task[T], member: Member, request: Request) -> T:
        """Return a task's result; _Elsewhere is raised if the replica is lost first, _Left if the client leaves."""
        others = [asyncio.create_task(member.lost.wait()), asyncio.create_task(gone(request))]
        try:
            await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if member.lost.is_set():
                raise _Elsewhere(f"replica {member.name} has ended")
            raise _Left
        finally:
            for pending in (task, *others):
                pending.cancel()

    async def _stream(self, answer: "aiohttp.ClientResponse", member: Member) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.content.iter_any():
                yield chunk
            self._answered(member, answer.status)
        finally:
            answer.close()
            self._done(member)

    def _answered(self, member: Member, status: int) -> None:
        if status < 500:
            member.answered = time.monotonic()
        self._outcomes.labels(member.name, str(status)).inc()

    def _done(self, member: Member) -> None:
        member.asked -= 1
        self._asked.labels(member.name).dec()


def _key(address: Address) -> dict[str, str]:
    return {} if address.key is None else {"Authorization": f"Bearer {address.key}"}
