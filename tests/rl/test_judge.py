import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.endpoint import client
from nemo_ext.endpoint.address import FILE, Address, write_address
from nemo_ext.endpoint.failures import Failed
from nemo_ext.job.settings import checked
from nemo_ext.rl.judge import Answer, Judge, JudgeSettings

SHORT = {"attempt_seconds": 1.0}
HELLO = [{"role": "user", "content": "hello"}]


def judge(endpoint: Any, **settings: Any) -> Judge:
    limits = {"attempt_seconds": 60.0, "total_seconds": 120.0, **settings}
    return Judge(checked(JudgeSettings, {"endpoint": endpoint.url, "model": "m", **limits}, "judge", strict=True))


def ask(asked: Judge, read: Any = str) -> Answer[Any]:
    return asyncio.run(asked.ask(HELLO, read))


def test_requests_have_the_form_of_openai_clients(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")

    answer = ask(judge(endpoint, key_variable="SOME_KEY", sampling={"temperature": 0.6}))

    assert answer == Answer(value="yes")
    assert endpoint.requests == [{"model": "m", "messages": HELLO, "temperature": 0.6, "stream": False}]
    assert endpoint.headers[0]["authorization"] == "Bearer sk-secret"


def test_a_run_directory_without_a_server_is_waited_for(endpoint: Any, tmp_path: Path) -> None:
    asked = Judge(JudgeSettings(endpoint=str(tmp_path), total_seconds=60.0))

    async def first_asked_then_served() -> Answer[str]:
        waiting = asyncio.create_task(asked.ask(HELLO, str))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        write_address(tmp_path / FILE, Address(url=endpoint.url, model="m", key="its-own"))
        return await waiting

    assert asyncio.run(first_asked_then_served()) == Answer(value="yes")
    assert (endpoint.requests[0]["model"], endpoint.headers[0]["authorization"]) == ("m", "Bearer its-own")
    nowhere = ask(Judge(JudgeSettings(endpoint="localhost:8000/v1")))
    assert nowhere.value is None and "or a URL that begins with http://" in nowhere.problem


def test_without_a_key_variable_no_key_is_sent(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")

    ask(judge(endpoint))

    assert "authorization" not in endpoint.headers[0]


@pytest.mark.parametrize(
    ("replied", "problem"),
    [
        ({"fault": "silent"}, "no answer within 1 s"),
        ({"fault": "dripping"}, "no answer within 1 s"),
        ({"fault": "dropped"}, "ServerDisconnectedError"),
        ({"fault": "cut"}, "ClientPayloadError"),
        ({"fault": "endless"}, "more than 64 MiB"),
        ({"fault": "no_http"}, "Error"),
        ({"status": 429}, "HTTP 429"),
        ({"status": 500}, "HTTP 500"),
        ({"status": 307, "headers": {"Location": "http://127.0.0.1:1/v1"}}, "HTTP 307"),
        ({"body": b"{"}, "not a chat completion"),
        ({"body": b"\xff\xfe"}, "not a chat completion"),
        ({"body": b"[" * 1_000_000}, "not a chat completion"),
        ({"body": b'{"choices": []}'}, "not a chat completion"),
        ({"body": b'{"choices": {"0": 1}}'}, "not a chat completion"),
        ({"body": b'{"choices": [3]}'}, "not a chat completion"),
        ({"body": b'{"error": {"message": "no"}}'}, "not a chat completion"),
        ({"text": None}, "without text"),
        ({"finish_reason": "length"}, "cut off"),
        ({"headers": {"Content-Encoding": "gzip"}}, "ClientPayloadError"),
    ],
    ids=str,
)
def test_a_failed_request_is_none_with_a_reason(
    endpoint: Any, reply: Any, replied: dict[str, Any], problem: str
) -> None:
    endpoint.reply = lambda payload: reply(**replied)

    answer = ask(judge(endpoint, attempts=2, **SHORT if "no answer" in problem else {}))

    assert answer.value is None
    assert problem in answer.problem
    assert len(endpoint.requests) == (1 if problem in ("HTTP 307", "more than 64 MiB") else 2)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "text", "finish_reason"]), inner, max_size=3
        )
    ),
)


@given(
    st.binary(max_size=50)
    | json_values.map(lambda value: json.dumps({"choices": value}).encode())
    | json_values.map(lambda value: json.dumps({"choices": [{"message": value}]}).encode())
)
def test_any_body_is_text_or_no_answer(body: bytes) -> None:
    try:
        text = client._read_answer(body, client.Request(body={}), 0.0).answer
    except Failed:
        return
    assert text is None or isinstance(text, str)


def test_text_in_parts(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text=[{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}])

    assert ask(judge(endpoint)).value == "yes"


def test_no_server() -> None:
    settings = JudgeSettings(endpoint="http://127.0.0.1:1/v1", model="m", attempts=2)

    assert "ClientConnectorError" in ask(Judge(settings)).problem


@pytest.mark.parametrize("first", [{"fault": "dropped"}, {"status": 503}, {"body": b"{"}, {"text": "perhaps"}], ids=str)
def test_unreadable_answers_are_retried(endpoint: Any, reply: Any, first: dict[str, Any]) -> None:
    replies = chain([reply(**first)] * 2, repeat(reply(text="4")))
    endpoint.reply = lambda payload: next(replies)

    answer = ask(judge(endpoint), lambda text: int(text) if text.isdigit() else None)

    assert answer.value == 4
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("nan", 0.0), ("inf", 0.0), ("soon", 0.0), ("", 0.0)]
)
def test_retry_after(header: str, seconds: float) -> None:
    assert client._retry_after(header) == seconds


def test_retry_after_a_date() -> None:
    assert client._retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert client._retry_after("Wed, 21 Oct 2215 07:28:00 GMT") == 600
    assert client._retry_after("Wed, 99 Oct 2215 07:28:00") == 0


def test_retry_after_is_respected_within_the_total_time(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(status=429, headers={"Retry-After": "3600"})

    began = time.monotonic()
    problem = ask(judge(endpoint, total_seconds=1.0)).problem

    assert time.monotonic() - began < 10
    assert problem.startswith("no answer within 1 s: HTTP 429")
    assert len(endpoint.requests) == 1


def test_many_questions_keep_their_order_and_the_concurrency_limit(endpoint: Any, reply: Any) -> None:
    def echo(payload: dict[str, Any]) -> Any:
        number = int(payload["messages"][0]["content"])
        return reply(text=str(number), seconds=(number * 7 % 5) / 100)

    endpoint.reply = echo
    questions = [[{"role": "user", "content": str(number)}] for number in range(100)]

    answers = asyncio.run(judge(endpoint, concurrency=8, total_seconds=60).ask_all(questions, int))

    assert [answer.value for answer in answers] == list(range(100))
    assert 1 < endpoint.most <= 8
    assert len(endpoint.requests) == 100


def test_the_total_time_limits_all_questions_together(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(fault="silent")

    began = time.monotonic()
    asked = judge(endpoint, concurrency=1, attempt_seconds=600, total_seconds=1.0)
    answers = asyncio.run(asked.ask_all([HELLO] * 20, str))

    assert time.monotonic() - began < 10
    assert [answer.value for answer in answers] == [None] * 20
    # After the time limit, the current question and the next ones may end in any order.
    assert sum("the request was never sent" in answer.problem for answer in answers) >= 15


def test_a_judge_pickles_and_works_in_one_event_loop_after_another(endpoint: Any) -> None:
    asked = judge(endpoint, concurrency=1)
    again = pickle.loads(pickle.dumps(asked))

    assert [ask(asked).value, ask(asked).value, ask(again).value] == ["yes"] * 3
    assert again.settings == asked.settings


def test_an_exception_of_the_reader_is_raised(endpoint: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        ask(judge(endpoint), lambda text: 1 / 0)


@pytest.mark.parametrize(
    "replied", [{"status": 400, "body": b"key sk-secret is bad"}, {"status": 401}, {"fault": "no_http"}, {}], ids=str
)
def test_the_key_appears_only_in_the_request(
    endpoint: Any,
    reply: Any,
    replied: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    endpoint.reply = lambda payload: reply(**replied)
    caplog.set_level("DEBUG")

    asked = judge(endpoint, key_variable="SOME_KEY")
    answer = ask(asked)

    assert "sk-secret" in endpoint.headers[0]["authorization"]
    assert "sk-secret" not in f"{answer} {asked.settings} {pickle.dumps(asked)!r} {caplog.text}"


def test_a_key_that_is_invalid_in_a_header(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-\nsecret")

    problem = ask(judge(endpoint, key_variable="SOME_KEY")).problem

    assert problem and "secret" not in problem


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"endpoint": "ftp://localhost:8000"}, "judge: endpoint is not a valid URL; the endpoint's URL must be like"),
        (
            {"endpoint": "http://me:secret@host/v1"},
            "the endpoint's URL must not contain a name, password",
        ),
        ({"endpoint": 3}, "judge.endpoint=3"),
        ({"model": ""}, "judge.model=''"),
        ({"attempts": 0}, "judge.attempts=0"),
        ({"concurrency": 1.5}, "judge.concurrency=1.5"),
        ({"total_seconds": float("inf")}, "judge.total_seconds=inf"),
        ({"attempt_seconds": "soon"}, "judge.attempt_seconds='soon'"),
        ({"sampling": {"model": "other"}}, "judge: sampling must not contain model"),
        ({"attempts": "3"}, "judge.attempts='3'"),
        ({"concurrency": True}, "judge.concurrency=True"),
        ({"sampling": {"stop": {1, 2}}}, "judge: the section has an invalid value"),
        ({"key_variable": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
        ({"total_second": 1}, "did you mean 'total_seconds'"),
        ({"model": None}, "judge: model is missing"),
    ],
    ids=str,
)
def test_settings_are_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        checked(JudgeSettings, {"endpoint": "http://localhost/v1", "model": "m", **changed}, "judge", strict=True)

    assert "secret" not in str(raised.value)


def test_sampling_may_have_keys_that_are_numbers() -> None:
    made = checked(
        JudgeSettings,
        {"endpoint": "http://x/v1", "model": "m", "sampling": {"logit_bias": {50256: -100}}},
        "judge",
        strict=True,
    )
    assert made.sampling == {"logit_bias": {"50256": -100}}


def test_check_finds_the_model(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(body=json.dumps({"data": [{"id": "m"}, {"id": "other"}]}).encode())

    asyncio.run(judge(endpoint).check())

    assert endpoint.requests == [{"path": "/v1/models"}]


@pytest.mark.parametrize(
    ("replied", "message"),
    [
        (
            {"body": b'{"data": [{"id": "mm"}]}'},
            "judge.endpoint cannot be used.*: unknown model 'm': did you mean 'mm'",
        ),
        ({"body": b'{"data": [3]}'}, "is not a list of models"),
        ({"body": b"<html>"}, "is not a list of models"),
        ({"status": 401}, "HTTP 401"),
        ({"fault": "silent"}, "no answer within 1 s"),
        ({"fault": "dropped"}, "ServerDisconnectedError"),
    ],
    ids=str,
)
def test_check_reports_the_problem(endpoint: Any, reply: Any, replied: dict[str, Any], message: str) -> None:
    endpoint.reply = lambda payload: reply(**replied)

    with pytest.raises(ValueError, match=message):
        asyncio.run(judge(endpoint, **SHORT if "no answer" in message else {}).check())


def test_ctrl_c_ends_waiting(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(fault="silent")
    code = f"""
import asyncio
from nemo_ext.rl.judge import Judge, JudgeSettings
judge = Judge(JudgeSettings(endpoint={endpoint.url!r}, model="m", attempt_seconds=500))
asyncio.run(judge.ask_all([[{{"role": "user", "content": "?"}}]] * 10, str))
"""
    waiting = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=dict(os.environ))
    while len(endpoint.requests) < 10:
        assert waiting.poll() is None
        time.sleep(0.01)

    waiting.send_signal(signal.SIGINT)
    _, errors = waiting.communicate(timeout=30)

    assert waiting.returncode != 0
    assert errors.decode().rstrip().endswith("KeyboardInterrupt")
