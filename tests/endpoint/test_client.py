"""The client of endpoints, also with an endpoint that returns errors."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.endpoint.address import AWAY, Address, read_address, write_address
from nemo_ext.endpoint.client import Answer, Client, ClientSettings, EndpointGone, Request

KEY = "a-long-secret"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)


def request(number: int) -> Request:
    return Request(key=str(number), body={"messages": [{"role": "user", "content": str(number)}]})


def said(payload: dict[str, Any]) -> str:
    return str(payload["messages"][0]["content"])


async def collected(client: Client, requests: Any, store: Any = None) -> list[Answer]:
    async with client:
        return [answer async for answer in client.answers(requests, store=store)]


def test_every_request_has_one_answer_in_order_of_arrival(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text=said(payload), seconds=0.3 if said(payload) == "0" else 0.0)

    found = asyncio.run(collected(Client(Address(url=endpoint.url)), map(request, range(30))))

    assert sorted(int(answer.key) for answer in found) == list(range(30))
    assert all(answer.answer == answer.key and not answer.problem for answer in found)
    assert found[-1].key == "0"


@pytest.mark.parametrize("status", [408, 429, 500, 501, 502, 503, 505, 507, 520, 524, 529])
def test_temporary_errors_are_retried(endpoint: Any, reply: Any, status: int) -> None:
    endpoint.reply = lambda payload: reply(text="yes", status=status if len(endpoint.requests) < 3 else 200)

    (answer,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (answer.answer, len(endpoint.requests)) == ("yes", 3)


def test_the_endpoint_sets_the_time_of_the_retry(endpoint: Any, reply: Any) -> None:
    first = reply(status=429, headers={"Retry-After": "0.6"})
    endpoint.reply = lambda payload: first if len(endpoint.requests) == 1 else reply(text="yes")

    began = time.monotonic()
    asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert time.monotonic() - began > 0.6


def test_requests_refused_for_their_content_are_sent_once_and_report_why(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(status=400, body=b'{"error": "too long"}')

    (answer,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (answer.answer, answer.status, len(endpoint.requests)) == (None, 400, 1)
    assert answer.problem == 'HTTP 400: {"error": "too long"}'


def test_the_number_of_attempts_is_limited(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(status=500, body=b"boom")

    client = Client(Address(url=endpoint.url), ClientSettings(attempts=3))
    (answer,) = asyncio.run(collected(client, [request(0)]))

    assert (answer.problem, len(endpoint.requests)) == ("HTTP 500: boom", 3)


def test_a_refused_key_ends_all_requests_and_is_never_shown(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(status=401, body=f"bad key {KEY}".encode())
    client = Client(Address(url=endpoint.url, key=KEY))

    with pytest.raises(ValueError, match="HTTP 401: the API key was rejected") as raised:
        asyncio.run(collected(client, map(request, itertools.count())))

    assert KEY not in str(raised.value) + repr(client.address)
    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"


def test_a_redirect_does_not_send_the_key_to_another_host(endpoints: Callable[[], Any], reply: Any) -> None:
    first, other = endpoints(), endpoints()
    first.reply = lambda payload: reply(status=307, headers={"Location": f"{other.url}/chat/completions"})

    (answer,) = asyncio.run(collected(Client(Address(url=first.url, key=KEY)), [request(0)]))

    assert answer.problem.startswith(f"HTTP 307: {first.url}/chat/completions")
    assert f"redirects to {other.url}/chat/completions" in answer.problem
    assert not other.requests


def test_requests_are_generated_on_demand(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text="yes", seconds=0.05)
    made = 0

    def endless() -> Iterator[Request]:
        nonlocal made
        for made in itertools.count(1):
            yield request(made)

    async def few() -> int:
        async with Client(Address(url=endpoint.url), ClientSettings(concurrency=4)) as client:
            answers = client.answers(endless())
            found = [await anext(answers) for _ in range(10)]
            await answers.aclose()
            return len({answer.key for answer in found})

    assert asyncio.run(few()) == 10
    assert made < 40
    assert endpoint.most <= 4


def test_requests_may_arrive_slowly(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text=said(payload))

    async def slow() -> AsyncIterator[Request]:
        for number in range(5):
            await asyncio.sleep(0.02)
            yield request(number)

    found = asyncio.run(collected(Client(Address(url=endpoint.url)), slow()))

    assert [answer.key for answer in found] == list("01234")


def test_stored_answers_are_not_requested_and_new_ones_are_stored_first(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text=said(payload))
    kept: dict[str, Answer] = {"1": Answer(answer="old")}

    class Kept:
        def has(self, request: Request) -> bool:
            return request.key in kept

        def add(self, request: Request, answer: Answer) -> None:
            kept[request.key] = answer

    async def ask() -> None:
        async with Client(Address(url=endpoint.url)) as client:
            async for answer in client.answers(map(request, range(4)), store=Kept()):
                assert kept[answer.key] is answer

    asyncio.run(ask())
    assert sorted(kept) == list("0123")
    assert kept["1"].answer == "old"
    assert len(endpoint.requests) == 3


def test_an_error_of_the_requests_is_raised(endpoint: Any) -> None:
    def broken() -> Iterator[Request]:
        yield request(0)
        raise OSError("the file went away")

    with pytest.raises(OSError, match="the file went away"):
        asyncio.run(collected(Client(Address(url=endpoint.url)), broken()))


def test_an_endpoint_that_moves_is_found_by_its_file(endpoints: Callable[[], Any], reply: Any, tmp_path: Path) -> None:
    first, second = endpoints(), endpoints()
    for each in (first, second):
        each.models = ["m"]
    second.reply = lambda payload: reply(text="from the second")
    write_address(tmp_path / "endpoint.json", Address(url=first.url, model="m"))

    async def ask() -> Answer:
        async with Client(tmp_path) as client:
            await client.check()
            first.stop()
            write_address(tmp_path / "endpoint.json", Address(url=second.url, model="m"))
            return await client.ask(request(0))

    assert asyncio.run(ask()).answer == "from the second"


def test_patience_ends(endpoint: Any) -> None:
    endpoint.stop()

    with pytest.raises(EndpointGone, match=r"no answer for 0\.2 s"):
        asyncio.run(collected(Client(Address(url=endpoint.url), ClientSettings(patience=0.2)), [request(0)]))


def test_the_first_look_says_what_is_wrong(endpoint: Any) -> None:
    async def check(model: str) -> str:
        async with Client(Address(url=endpoint.url, model=model), ClientSettings(patience=0.2)) as client:
            await client.check()
            return client.address.model

    endpoint.models = ["nano-30b"]
    assert asyncio.run(check("")) == "nano-30b"
    with pytest.raises(ValueError, match="unknown model 'nano-30': did you mean 'nano-30b'"):
        asyncio.run(check("nano-30"))
    endpoint.stop()
    with pytest.raises(ValueError, match="ClientConnectorError"):
        asyncio.run(check(""))


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    write_address(tmp_path / "endpoint.json", Address(url="http://n1:80/v1/", model="m", key="other", digest="d"))

    assert (tmp_path / "endpoint.json").stat().st_mode & 0o777 == 0o600
    assert read_address(tmp_path) == Address(url="http://n1:80/v1", model="m", key="other", digest="d")
    assert read_address(tmp_path / "endpoint.json", "n", "MY_KEY").key == KEY
    assert read_address("https://host/v1", "m", "MY_KEY") == Address(url="https://host/v1", model="m", key=KEY)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("http://me:word@host/v1", "must not contain a name, password or query"),
        ("http://host/v1?key=x", "must not contain a name, password or query"),
        ("ftp://host/v1", "must be like http://localhost:8000/v1"),
        ("nowhere", "does not exist; check the path, or wait until"),
        ("bad.json", "does not contain the address of an endpoint"),
        ("list.json", "does not contain the address of an endpoint"),
    ],
)
def test_an_address_that_is_none(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text(json.dumps([1]))

    with pytest.raises(ValueError, match=said):
        read_address(place if "://" in place else tmp_path / place)


def test_a_key_variable_that_is_not_set() -> None:
    with pytest.raises(ValueError, match="the environment variable NO_SUCH_KEY is not set"):
        read_address("http://host/v1", None, "NO_SUCH_KEY")


def test_a_new_server_has_a_new_key(endpoint: Any, reply: Any, tmp_path: Path) -> None:
    place = tmp_path / "endpoint.json"
    write_address(place, Address(url=endpoint.url, model="m", key="old"))

    def answer(payload: dict[str, Any]) -> Any:
        if endpoint.headers[-1]["authorization"] == "Bearer new":
            return reply(text="yes")
        write_address(place, Address(url=endpoint.url, model="m", key="new"))
        return reply(status=401)

    endpoint.reply = answer

    (found,) = asyncio.run(collected(Client(place), [request(0)]))

    assert (found.answer, len(endpoint.requests)) == ("yes", 2)


@pytest.mark.slow
def test_an_endpoint_without_replicas_is_waited_for_and_costs_no_attempt(endpoint: Any, reply: Any) -> None:
    gone = reply(status=503, headers={AWAY: "1", "Retry-After": "0"})
    endpoint.reply = lambda payload: gone if len(endpoint.requests) < 12 else reply(text="yes")

    (found,) = asyncio.run(collected(Client(Address(url=endpoint.url), ClientSettings(attempts=1)), [request(0)]))

    assert found.answer == "yes"


def test_what_is_no_json_is_a_problem_of_its_own(endpoint: Any) -> None:
    (found,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [Request(body={"prompt": b"bytes"})]))

    assert "the request cannot be written as JSON" in found.problem
    assert not endpoint.requests


@pytest.mark.parametrize("half", ["\\ud83d", "\\uD83D", "\udc00"])
def test_half_a_character_becomes_a_mark(endpoint: Any, reply: Any, half: str) -> None:
    body = '{"choices": [{"message": {"content": "half HALF"}}], "usage": {"completion_tokens": true}}'
    endpoint.reply = lambda payload: reply(body=body.replace("HALF", half).encode(errors="surrogatepass"))

    (found,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (found.answer, found.completion_tokens) == ("half ?", None)


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        ({"content": None}, "length"),
        ({}, "length"),
        ({"content": None, "reasoning_content": "Let me"}, "length"),
        ({"content": None}, "content_filter"),
        ({"content": None}, "stop"),
        ({"content": None, "refusal": "I cannot"}, None),
        ({"content": [{"type": "refusal", "refusal": "I cannot"}]}, "stop"),
        ({"content": [{"type": "text", "text": None}]}, "length"),
    ],
    ids=str,
)
def test_a_model_that_ends_without_text_has_answered(endpoint: Any, reply: Any, message: Any, ended: Any) -> None:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": ended}
    endpoint.reply = lambda payload: reply(body=json.dumps({"choices": [choice]}).encode())

    (found,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (found.answer, found.finish_reason, found.problem, len(endpoint.requests)) == ("", ended, "", 1)


def test_calls_alone_have_no_text(endpoint: Any, reply: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    endpoint.reply = lambda payload: reply(body=json.dumps({"choices": [choice]}).encode())

    (found,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (found.answer, found.tool_calls, found.problem) == (None, (call,), "")


def test_a_path_that_is_missing_is_named(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(status=404, body=b'{"detail":"Not Found"}')
    client = Client(Address(url=endpoint.url.removesuffix("/v1")))

    with pytest.raises(ValueError, match=rf"HTTP 404: {endpoint.url.removesuffix('/v1')}/models: .*Not Found"):
        asyncio.run(client.check())
    (answer,) = asyncio.run(collected(client, [request(0)]))

    assert f"HTTP 404: {client.address.url}/chat/completions" in answer.problem


PAGE = b"<!DOCTYPE html><html><head><meta charset=utf-8><title>\n502 Bad Gateway</title></head>" + b"<p>x" * 100


@pytest.mark.parametrize(
    ("body", "attempts", "status", "said"),
    [
        ({"error": {"message": "no such field", "code": 400}}, 1, 400, "400: no such field"),
        ({"error": {"message": "no such field", "code": "400"}}, 1, 400, "400: no such field"),
        ({"error": {"message": "bad", "type": "invalid_request_error"}}, 1, 400, "invalid_request_error: bad"),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, 1, 400, "400: too long"),
        ([{"error": {"message": "bad", "status": "INVALID_ARGUMENT", "code": 400}}], 1, 400, "400: bad"),
        ({"error": "no model", "code": 404}, 1, 404, "404: no model"),
        ({"error": {"message": "slower", "code": 429}}, 3, 429, "429: slower"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, 3, 429, "overloaded_error: busy"),
        ({"error": {"message": "full", "status": "RESOURCE_EXHAUSTED", "code": 8}}, 3, 429, "8: full"),
        ({"error": {"message": "long", "type": "request_too_large"}}, 1, 413, "request_too_large: long"),
        ({"error": "too many tokens", "error_type": "validation"}, 1, 400, "validation: too many tokens"),
        ({"error": {"message": "upstream", "code": 1305}}, 3, None, "1305: upstream"),
        ({"error": "upstream"}, 3, None, "upstream"),
        ({"choices": [{"error": {"message": "cut", "code": 502}, "message": {"content": "a"}}]}, 3, 502, "502: cut"),
        (PAGE, 3, None, "a page: 502 Bad Gateway"),
        (b'{"choices": [{"mess', 3, None, '{"choices": [{"mess'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_error_in_place_of_an_answer(
    endpoint: Any, reply: Any, body: Any, attempts: int, status: int | None, said: str
) -> None:
    endpoint.reply = lambda payload: reply(body=body if isinstance(body, bytes) else json.dumps(body).encode())
    client = Client(Address(url=endpoint.url), ClientSettings(attempts=3))
    overloaded = []
    client.pace.overloaded = lambda: overloaded.append(1)  # type: ignore[method-assign]

    (answer,) = asyncio.run(collected(client, [request(0)]))

    assert (len(endpoint.requests), answer.status, answer.answer) == (attempts, status, None)
    assert answer.problem.startswith("the response is not a chat completion") and answer.problem.endswith(said)
    assert len(overloaded) == (3 if status == 429 else 0)


@pytest.mark.parametrize("end", ["length", "max_tokens", "MAX_TOKENS", "model_length"])
def test_a_cut_off_answer_says_so_by_one_name(endpoint: Any, reply: Any, end: str) -> None:
    choice = {"message": {"role": "assistant", "content": None}, "finish_reason": end}
    endpoint.reply = lambda payload: reply(body=json.dumps({"choices": [choice]}).encode())

    (answer,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (answer.answer, answer.finish_reason, answer.problem) == ("", "length", "")


@pytest.mark.parametrize("end", ["error", "ERROR", "abort", "insufficient_system_resource"])
def test_an_answer_that_the_server_breaks_off_is_asked_again(endpoint: Any, reply: Any, end: str) -> None:
    endpoint.reply = lambda payload: (
        reply(text="half of", finish_reason=end) if len(endpoint.requests) == 1 else reply(text="whole")
    )

    (answer,) = asyncio.run(collected(Client(Address(url=endpoint.url)), [request(0)]))

    assert (answer.answer, len(endpoint.requests)) == ("whole", 2)


@pytest.mark.parametrize("status", [401, 403, 200])
def test_a_refused_key_is_named_by_its_place(
    endpoint: Any, reply: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    body = json.dumps({"error": {"message": f"bad key {KEY}", "code": 401}}).encode()
    endpoint.reply = lambda payload: reply(status=status, body=body)
    monkeypatch.setenv("MY_KEY", KEY)
    write_address(tmp_path / "endpoint.json", Address(url=endpoint.url, model="m", key="of-the-file"))

    def said(*where: Any, **more: Any) -> str:
        texts = []
        for ask in (lambda client: client.check(), lambda client: collected(client, [request(0)])):
            with pytest.raises(ValueError, match=" API key ") as raised:
                asyncio.run(ask(Client(*where, **more)))
            texts.append(str(raised.value).partition(" API key ")[2])
            assert KEY not in str(raised.value) and "of-the-file" not in str(raised.value)
        assert texts[0] == texts[1]
        return texts[0]

    assert "variable MY_KEY" in said(endpoint.url, model="m", key_variable="MY_KEY")
    assert str(tmp_path) in said(tmp_path)
    assert "was sent; set key_variable" in said(endpoint.url, model="m")


def test_fields_that_an_endpoint_refuses_are_left_out(endpoint: Any, reply: Any) -> None:
    refused = b'{"object": "error", "message": "Extra inputs are not permitted: seed", "code": 422}'
    endpoint.reply = lambda payload: reply(status=422, body=refused) if "seed" in payload else reply(text="yes")
    asked = Request(body={"messages": [], "seed": 1, "temperature": 0.5})

    async def answer(settings: ClientSettings) -> Answer:
        async with Client(Address(url=endpoint.url), settings) as client:
            return await client.ask(asked)

    assert "HTTP 422" in asyncio.run(answer(ClientSettings())).problem
    found = asyncio.run(answer(ClientSettings(omit=("seed",))))
    assert (found.answer, found.seed, endpoint.requests[-1]["temperature"]) == ("yes", None, 0.5)
    with pytest.raises(ValueError, match="omit=messages: every request needs"):
        ClientSettings(omit=("messages", "seed"))
