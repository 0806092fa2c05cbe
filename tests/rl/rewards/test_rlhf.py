import asyncio
import json
from typing import Any

import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Message
from nemo_ext.rl.judge import Judge, JudgeSettings
from nemo_ext.rl.rewards.comparison import GroupRewards, LengthControl
from nemo_ext.rl.rewards.genrm import instructed_messages
from nemo_ext.rl.rewards.rlhf import rlhf_rewards

PROMPT = (Message(role="user", content="Name a number."),)


def group(*answers: str) -> list[Response]:
    return [parse_response(f"<think>{'hm ' * (place + 1)}</think>{answer}") for place, answer in enumerate(answers)]


def by_number(payload: dict[str, Any]) -> str:
    """Judgement of a judge that prefers the answer with the larger number."""
    first, second = (int(message["content"]) for message in payload["messages"][-2:])
    return json.dumps({"score_1": first, "score_2": second, "ranking": 1 if first > second else 6})


def rewards(endpoint: Any, responses: list[Response], seconds: float = 60, **rules: Any) -> GroupRewards:
    settings = JudgeSettings(endpoint=endpoint.url, model="genrm", attempt_seconds=seconds, attempts=2)
    return asyncio.run(rlhf_rewards(Judge(settings), PROMPT, responses, **rules))


@pytest.mark.parametrize(("both_orders", "calls"), [(True, 10), (False, 5)])
def test_judge_calls_grow_with_the_group_and_no_faster(
    endpoint: Any, reply: Any, both_orders: bool, calls: int
) -> None:
    endpoint.reply = lambda payload: reply(text=by_number(payload))

    earned = rewards(endpoint, group("5", "4", "3", "2", "1"), both_orders=both_orders)

    assert earned.base == (5, 4, 3, 2, 1)
    assert len(endpoint.requests) == calls
    assert earned.length[0] == pytest.approx(0.25)  # by the traces alone, the answers are equally long


def test_the_judge_sees_answers_without_their_traces(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text=by_number(payload))

    rewards(endpoint, group("4", "2"))

    assert "hm" not in json.dumps(endpoint.requests)
    assert endpoint.requests[0]["messages"][0] == {"role": "user", "content": "Name a number."}


def test_comparisons_without_a_judgement_are_ignored_and_counted(endpoint: Any, reply: Any) -> None:
    def but_for_two(payload: dict[str, Any]) -> Any:
        first, second = (message["content"] for message in payload["messages"][-2:])
        if (first, second) == ("5", "4"):
            return reply(fault="dropped")
        return reply(text="I cannot say" if (first, second) == ("4", "3") else by_number(payload))

    endpoint.reply = but_for_two

    earned = rewards(endpoint, group("5", "4", "3", "1"), both_orders=True)

    assert earned.base == (5, 4, 3, 1)
    assert earned.missing == 2


@pytest.mark.parametrize("fault", ["silent", "dropped", "dripping"])
def test_a_judge_that_is_down_teaches_nothing(endpoint: Any, reply: Any, fault: str) -> None:
    endpoint.reply = lambda payload: reply(fault=fault)

    earned = rewards(endpoint, group("5", "4444", "3"), seconds=0.3)

    assert earned.rewards == (3, 3, 3)
    assert (earned.judged, earned.missing) == ((False,) * 3, 3)


def test_any_chat_model_can_judge(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text='{"score_1": 3, "score_2": 3, "ranking": 3}')

    earned = rewards(endpoint, group("a", "b"), show=instructed_messages, control=LengthControl(thinking=0, answer=0))

    assert earned.base == (3, 3)  # one is preferred in one order, the other in the other
    assert [message["role"] for message in endpoint.requests[0]["messages"]] == ["user"]


@pytest.mark.parametrize("answers", [(), ("5",)], ids=str)
def test_a_group_too_small_to_compare_sends_no_request(endpoint: Any, answers: tuple[str, ...]) -> None:
    earned = rewards(endpoint, group(*answers))

    assert earned.rewards == (3,) * len(answers)
    assert endpoint.requests == []


def test_the_judge_sees_no_more_than_it_can_read(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text='{"score_1": 3, "score_2": 2, "ranking": 3}')

    rewards(endpoint, group("a" * 1_000_000, "b"), max_answer_characters=100)

    assert endpoint.requests[0]["messages"][-2]["content"] == "a" * 100 + "\n[...]"
