"""Comparison of groups over HTTP."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.gym

Serve = Callable[..., Any]


def better(reply: Any) -> Callable[[dict[str, Any]], Any]:
    """Judge that prefers the longer response."""

    def judge(payload: dict[str, Any]) -> Any:
        first, second = (len(message["content"]) for message in payload["messages"][-2:])
        assert [message["role"] for message in payload["messages"][-2:]] == ["response_1", "response_2"]
        ranking = 1 if first > second else 6
        return reply(text=f'{{"score_1": {min(first, 5)}, "score_2": {min(second, 5)}, "ranking": {ranking}}}')

    return judge


def settings(url: str, **given: Any) -> dict[str, Any]:
    judge = {"endpoint": url, "model": "genrm", "attempts": 1, "attempt_seconds": 30, "total_seconds": 60}
    none = {"thinking": 0, "answer": 0, "thinking_bonus": 0, "answer_bonus": 0}
    return {"judge": judge | given.pop("judge", {}), "group_size": 3, "length_control": none, **given}


def compared(client: Any, openai: SimpleNamespace, members: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Rewards of group members, given as (answer, task, rollout)."""

    def one(member: tuple[str, int, int]) -> dict[str, Any]:
        text, task, rollout = member
        row = {"responses_create_params": {"input": [{"role": "user", "content": "Say something."}]}}
        row |= {"_ng_task_index": task, "_ng_rollout_index": rollout}
        answer = client.post("/verify", json={**row, "response": openai.response(openai.said(text))})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    with client, ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(one, members))


def test_two_groups_with_the_same_prompt_are_compared_separately(
    serve: Serve, openai: SimpleNamespace, endpoint: Any, reply: Any
) -> None:
    endpoint.reply = better(reply)
    client = serve(**settings(endpoint.url))

    made = compared(client, openai, [("a" * (n + 1), task, n) for n in range(3) for task in (0, 1)])

    assert [one["reward"] for one in made] == [1, 1, 2, 2, 3, 3]
    assert {one["group_size"] for one in made} == {3} and not any(one["missing_comparisons"] for one in made)
    assert len(endpoint.requests) == 2 * 3


def test_a_silent_judge_does_not_block_requests(
    serve: Serve, openai: SimpleNamespace, endpoint: Any, reply: Any
) -> None:
    endpoint.reply = lambda payload: reply(fault="silent")
    client = serve(**settings(endpoint.url, judge={"total_seconds": 0.5}))

    made = compared(client, openai, [("a" * (n + 1), 0, n) for n in range(3)])

    assert {one["reward"] for one in made} == {3.0} and {one["missing_comparisons"] for one in made} == {3}
    assert {one["_ng_failure_class"] for one in made} == {"verifier_error"}


def test_a_group_does_not_wait_forever(serve: Serve, openai: SimpleNamespace, endpoint: Any, reply: Any) -> None:
    endpoint.reply = better(reply)
    client = serve(**settings(endpoint.url, wait_seconds=1.0))

    made = compared(client, openai, [("a", 0, 0), ("aaaa", 0, 1)])

    assert [(one["reward"], one["group_size"]) for one in made] == [(1, 2), (4, 2)]


def test_traces_are_not_shown_to_the_judge(serve: Serve, openai: SimpleNamespace, endpoint: Any, reply: Any) -> None:
    endpoint.reply = better(reply)
    client = serve(**settings(endpoint.url, group_size=2))

    compared(client, openai, [("<think>long thoughts</think>a", 0, 0), ("bb", 0, 1)])

    shown = {message["content"] for request in endpoint.requests for message in request["messages"][-2:]}
    assert shown == {"a", "bb"}
