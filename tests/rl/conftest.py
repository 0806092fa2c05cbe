"""A stand-in for an OpenAI-compatible endpoint, over real HTTP, that also misbehaves."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one request gets: a chat completion of `text`, or `body`, or a fault."""

    text: Any = ""
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    finish_reason: str = "stop"
    fault: Literal["", "silent", "dropped", "cut", "dripping", "endless", "no_http"] = ""

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        return json.dumps({"choices": [choice]}).encode()


class Endpoint:
    """Serves on a thread of its own.

    Attributes:
        reply: called with each request's payload; raise nothing in it.
        requests: payloads, in the order they came.
        headers: of each.
        most: requests that were under way at once.
    """

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Reply] = lambda payload: Reply(text="yes")
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = 0
        self._under_way = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def stop(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            self._under_way -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        payload = json.loads(body) if body else {"path": request.split()[1]}
        self.requests.append(payload)
        self.headers.append(headers)
        reply = self.reply(payload)
        await asyncio.sleep(reply.seconds)
        if reply.fault == "silent":
            await reader.read()
            return
        if reply.fault == "dropped":
            return
        if reply.fault == "no_http":
            writer.write(b"\x00\xff not at all \r\n\r\n")
            return
        content = reply.content()
        sent = {"Content-Type": "application/json", "Content-Length": str(len(content)), **reply.headers}
        if reply.fault in ("dripping", "endless"):
            del sent["Content-Length"]
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"HTTP/1.1 {reply.status} X\r\n{head}Connection: close\r\n\r\n".encode())
        while reply.fault == "dripping":
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)
        while reply.fault == "endless":
            writer.write(b" " * (1 << 16))
            await writer.drain()
        writer.write(content[: len(content) // 2] if reply.fault == "cut" else content)
        await writer.drain()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    started = Endpoint()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def reply() -> type[Reply]:
    """What `endpoint.reply` returns."""
    return Reply
