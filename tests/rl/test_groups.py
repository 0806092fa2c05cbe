import json
from typing import Any

import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.rl.environments import make
from nemo_ext.rl.groups import Member, check_judges, group_reward, lengths

PROMPT = (Message(role="user", content="Say something."),)


def member(text: str) -> Member:
    return Member(reward=1.0, thinking_tokens=0, answer_tokens=len(text), prompt=PROMPT, response=parse_response(text))


def judge(url: str) -> dict[str, Any]:
    return {"endpoint": url, "model": "judge", "attempts": 1, "attempt_seconds": 5, "total_seconds": 5}


def judgement(first: int, second: int) -> str:
    return json.dumps({"score_1": first, "score_2": second, "ranking": 2 if first > second else 5})


@pytest.mark.parametrize(("both", "questions"), [(True, 6), (False, 3)])
def test_the_better_response_earns_more(endpoint: Any, reply: Any, both: bool, questions: int) -> None:
    def compare(payload: dict[str, Any]) -> Any:
        first, second = (message["content"] for message in payload["messages"][-2:])
        return reply(text=judgement(5 if "good" in first else 2, 5 if "good" in second else 2))

    endpoint.reply = compare
    reward = group_reward({"judge": judge(endpoint.url), "both_orders": both, "length_control": {"thinking": 0.0}})
    assert reward is not None

    ((good, bad, other),) = reward([[member("good 1"), member("bad. 1"), member("bad. 2")]])

    assert good > max(bad, other)
    assert len(endpoint.requests) == questions


def test_lengths_are_in_tokens(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text=judgement(3, 3))
    reward = group_reward({"judge": judge(endpoint.url), "length_control": {"percentile": 0}})
    assert reward is not None
    few, many, none = (
        Member(reward=0.0, thinking_tokens=thinking, answer_tokens=answer, prompt=PROMPT, response=parse_response(text))
        for text, thinking, answer in (
            ("<think>aaaaaaaaaaaa</think>internationalization", 5, 3),
            ("<think>?!</think>)*(", 9, 5),
            ("<think></think>", 2, 1),  # the tags and the end token
        )
    )

    ((first, second, empty),) = reward([[few, many, none]])

    assert first > max(second, empty), "shorter responses earn more unless they are empty"


def test_a_response_with_only_calls_is_not_empty() -> None:
    call = Response(text="", tool_calls=(ToolCall(name="f", arguments={}),))
    said: dict[str, Any] = {"reward": 0.0, "thinking_tokens": 2, "answer_tokens": 9, "prompt": PROMPT}

    assert lengths(Member(response=call, **said)) == (0, 9)
    assert lengths(Member(response=Response(text=""), **said)) == (0, 0)


def test_unanswered_questions_are_reported(endpoint: Any, reply: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([reply(text=judgement(5, 2)), reply(status=400)])
    endpoint.reply = lambda payload: next(answers)
    reward = group_reward({"judge": judge(endpoint.url)})
    assert reward is not None

    reward([[member("one"), member("two")]])

    assert "the judge did not answer 1 questions, which are not counted: HTTP 400" in capsys.readouterr().err


def test_an_unreachable_judge_ends_the_run(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(status=401)
    reward = group_reward({"judge": judge(endpoint.url)})
    assert reward is not None

    with pytest.raises(ValueError, match=r"answered none of 4 questions \(HTTP 401"):
        reward([[member("one"), member("two")], [member("three"), member("four")]])


def test_judges_are_checked_before_a_run(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(body=json.dumps({"data": [{"id": "judge"}]}).encode())
    environments = [make("judge", {"judge": judge(endpoint.url)}), make("chat")]

    check_judges(environments, {"judge": judge(endpoint.url)})
    assert [request["path"] for request in endpoint.requests] == ["/v1/models"] * 2
    with pytest.raises(ValueError, match="environment 'chat' requires a judge"):
        check_judges(environments, {})
    with pytest.raises(ValueError, match="did you mean 'judge'"):
        check_judges([], {"judge": {**judge(endpoint.url), "model": "jugde"}})


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"show": "genrn", "judge": {}}, "show='genrn': input should be 'genrm'"),
        ({"lenght_control": {}}, "did you mean 'length_control'"),
        ({"length_control": {"thinking": -1}}, "thinking=-1"),
    ],
)
def test_invalid_settings_are_reported(group: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        group_reward(group)


def test_a_reward_model_scores_each_response(endpoint: Any, reply: Any) -> None:
    said = {"good": "reward:-1.5", "bad": "-7.25", "odd": "I like it: 5"}
    endpoint.reply = lambda payload: reply(text=said[payload["messages"][-1]["content"]])
    given = {"judge": judge(endpoint.url), "show": "reward_model"}
    plain, controlled = group_reward(given), group_reward({**given, "length_control": {"answer": 1, "answer_bonus": 0}})
    assert plain is not None and controlled is not None
    members = [member("good"), member("bad"), member("odd")]

    assert plain([members]) == [(-1.5, -7.25, (-1.5 - 7.25) / 2)], (
        "unreadable scores are replaced by the mean of the others"
    )
    assert [message["role"] for message in endpoint.requests[0]["messages"]] == ["user", "assistant"]
    assert controlled([members])[0][0] < -1.5, "the longest"
