"""The balancer in front of replicas that die, hang and come back."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from nemo_ext.endpoint.address import AWAY, Address, read_address, write_address
from nemo_ext.serving import balancer as module
from nemo_ext.serving import members
from nemo_ext.serving.balancer import Balancer
from nemo_ext.serving.members import FOLDER, Watch, present

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_BEAT", 0.05)
    monkeypatch.setattr(members, "_LOST", 0.5)
    monkeypatch.setattr(module, "_LOOK", 0.05)
    monkeypatch.setattr(module, "_PROBE_EVERY", 0.2)
    monkeypatch.setattr(module, "_PROBE_WAIT", 1.0)


@pytest.fixture
def replica(tmp_path: Path, endpoints: Callable[[], Any], reply: Any) -> Callable[..., Any]:
    """Starts a replica that answers with its name; `beats` says whether it touches its file."""
    started = []

    def start(name: str, *, beats: Callable[[], bool] = lambda: True) -> Any:
        made = endpoints()
        made.reply = lambda payload: reply(text=name)
        address = Address(url=made.url, model="m", key="k")
        manager = present(tmp_path / FOLDER / name, address, beats)
        (tmp_path / FOLDER / name).mkdir(parents=True, exist_ok=True)
        manager.__enter__()
        started.append(manager)
        return made

    yield start
    for manager in started:
        manager.__exit__(None, None, None)


async def balanced(run_dir: Path, do: Callable[[Balancer, httpx.AsyncClient], Any], *, up: int = 1) -> Any:
    """Result of a coroutine function of a balancer, once so many replicas answer, and of a client of it."""
    made = Balancer(Watch(run_dir))
    keeping = asyncio.create_task(made.keep())
    transport = httpx.ASGITransport(app=made.app("key"))
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://b", headers=headers, timeout=60) as client:
        try:
            await until(lambda: made.up >= up)
            return await do(made, client)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def until(holds: Callable[[], bool], *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def ask(client: httpx.AsyncClient) -> str:
    response = await client.post("/v1/chat/completions", json=ASKED)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_requests_go_to_the_replica_with_the_fewest(tmp_path: Path, replica: Any, reply: Any) -> None:
    one, two = replica("one"), replica("two")
    for each, name in ((one, "one"), (two, "two")):
        each.reply = lambda payload, name=name: reply(text=name, seconds=0.2 if "messages" in payload else 0.0)

    async def many(balancer: Balancer, client: httpx.AsyncClient) -> list[str]:
        return await asyncio.gather(*(ask(client) for _ in range(20)))

    answered = asyncio.run(balanced(tmp_path, many, up=2))

    assert abs(answered.count("one") - 10) <= 2


def test_the_key_is_the_replicas_own(tmp_path: Path, replica: Any) -> None:
    one = replica("one")

    async def once(balancer: Balancer, client: httpx.AsyncClient) -> int:
        await ask(client)
        return (await client.get("/v1/models", headers={"Authorization": "Bearer other"})).status_code

    assert asyncio.run(balanced(tmp_path, once)) == 401
    assert {headers["authorization"] for headers in one.headers} == {"Bearer k"}


@pytest.mark.parametrize("fault", ["dropped", "cut", "no_http"])
def test_what_a_replica_does_not_answer_another_does(tmp_path: Path, replica: Any, reply: Any, fault: str) -> None:
    one, _ = replica("one"), replica("two")
    one.reply = lambda payload: reply(fault=fault) if "messages" in payload else reply(text="probe")

    async def many(balancer: Balancer, client: httpx.AsyncClient) -> set[str]:
        return {await ask(client) for _ in range(6)}

    assert asyncio.run(balanced(tmp_path, many, up=2)) == {"two"}


def test_a_replica_whose_file_is_not_touched_is_left_at_once(tmp_path: Path, replica: Any, reply: Any) -> None:
    lives = threading.Event()
    lives.set()
    one = replica("one", beats=lives.is_set)
    one.reply = lambda payload: reply(fault="silent" if "messages" in payload else "")

    async def lose(balancer: Balancer, client: httpx.AsyncClient) -> str:
        waiting = asyncio.create_task(ask(client))
        await until(lambda: any("messages" in request for request in one.requests))
        replica("two")
        await until(lambda: balancer.up == 2)
        lives.clear()
        return await waiting

    assert asyncio.run(balanced(tmp_path, lose)) == "two"


def test_files_of_earlier_starts_are_not_believed(tmp_path: Path, replica: Any, endpoints: Any, reply: Any) -> None:
    old = endpoints()
    old.reply = lambda payload: reply(text="old")
    write_address(tmp_path / FOLDER / "old" / "endpoint.json", Address(url=old.url, model="m"))
    replica("new")

    async def many(balancer: Balancer, client: httpx.AsyncClient) -> set[str]:
        await asyncio.sleep(0.5)
        return {await ask(client) for _ in range(5)}

    assert asyncio.run(balanced(tmp_path, many)) == {"new"}
    assert not old.requests


def test_one_that_fails_is_taken_in_again(tmp_path: Path, replica: Any, reply: Any) -> None:
    one = replica("one")
    good = one.reply

    async def fail(balancer: Balancer, client: httpx.AsyncClient) -> str:
        one.reply = lambda payload: reply(status=500)
        await until(lambda: balancer.up == 0)
        response = await client.post("/v1/chat/completions", json=ASKED)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert (await client.get("/health")).status_code == 503
        one.reply = good
        await until(lambda: balancer.up == 1)
        return await ask(client)

    assert asyncio.run(balanced(tmp_path, fail)) == "one"


def test_refusals_are_passed_on_and_asked_once(tmp_path: Path, replica: Any, reply: Any) -> None:
    one = replica("one")
    one.reply = lambda payload: reply(
        status=400 if "messages" in payload else 200, body=b'{"error": {"message": "no"}}'
    )

    async def refused(balancer: Balancer, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=ASKED)

    response = asyncio.run(balanced(tmp_path, refused))

    assert (response.status_code, response.json()["error"]["message"]) == (400, "no")
    assert sum("messages" in request for request in one.requests) == 1


def test_without_replicas_the_endpoint_is_away(tmp_path: Path) -> None:
    async def work(balancer: Balancer, client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=ASKED)

    response = asyncio.run(balanced(tmp_path, work, up=0))

    assert (response.status_code, response.headers[AWAY]) == (503, "1")


def test_what_fails_everywhere_is_tried_twice(tmp_path: Path, replica: Any, reply: Any) -> None:
    started = [replica(name) for name in "abc"]
    for each in started:
        each.reply = lambda payload: reply(status=500, body=b"boom") if "messages" in payload else reply(text="")

    async def work(balancer: Balancer, client: httpx.AsyncClient) -> int:
        return (await client.post("/v1/chat/completions", json=ASKED)).status_code

    assert asyncio.run(balanced(tmp_path, work, up=3)) == 500
    assert sum("messages" in payload for each in started for payload in each.requests) == 2


def test_a_file_of_another_is_left_alone_and_one_that_goes_is_written_again(tmp_path: Path) -> None:
    one, two = Address(url="http://one/v1"), Address(url="http://two/v1")

    with present(tmp_path, one, lambda: True) as file:
        file.unlink()
        asyncio.run(until(file.exists))
        assert read_address(file) == one
        write_address(file, two)
        time.sleep(0.2)
    assert read_address(tmp_path) == two
