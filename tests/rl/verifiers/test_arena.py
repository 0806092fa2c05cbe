"""Comparison of an answer with a baseline's, in both orders."""

from typing import Any

import pytest

from nemo_ext.rl.environments import make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.arena import parse_game
from tests.rl.verdicts import verdict_on


def verify(endpoint: Any, answer: str, **settings: Any) -> Verdict:
    made = make("arena", {"judge": {"endpoint": endpoint.url, "model": "m", "attempts": 1}, **settings})
    return verdict_on(made, answer, {"question": "Write a poem.", "answer": "THEIRS"})


@pytest.mark.parametrize(
    ("after", "before", "wins", "games"),  # labels if the answer is B, and if it is A
    [
        ("B>>A", "A>>B", 6, 6),
        ("B>A", "A>B", 2, 2),
        ("A>B", "A>>B", 3, 4),
        ("A=B", "A=B", 1, 2),
        ("A>>B", "A=B", 0.5, 4),
        ("A>B", "B>>A", 0, 4),
    ],
)
def test_wins_are_weighted_as_by_arena_hard(
    endpoint: Any, reply: Any, after: str, before: str, wins: float, games: int
) -> None:
    def judge(payload: Any) -> Any:
        asked = payload["messages"][0]["content"]
        first = asked.index("OURS") < asked.index("THEIRS")
        return reply(text=f"[[A=B]] at first, but:\n**[[{before if first else after}]]**")

    endpoint.reply = judge
    verdict = verify(endpoint, "<think>Hm.</think>OURS")

    assert verdict.more == {"win_rate": (wins, games)}
    assert verdict.score == wins / games
    assert (verdict.outcome == "correct") == (wins == games)
    assert len(endpoint.requests) == 2
    assert all("Hm." not in request["messages"][0]["content"] for request in endpoint.requests)


def test_empty_and_overlong_answers_lose_without_a_judge(endpoint: Any) -> None:
    for answer in ("", "<think>Hm", "x" * 11):
        verdict = verify(endpoint, answer, max_answer_characters=10)
        assert (verdict.score, verdict.more) == (0, {"win_rate": (0, 6)})
    assert endpoint.requests == []


def test_a_judge_without_a_verdict_is_an_error(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text="[[A>B]]\nI cannot say.")
    assert verify(endpoint, "OURS").outcome == "error"


def test_own_answers_are_a_setting(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(text="[[A=B]]")
    verify(endpoint, "OURS", own_answer=False)
    verify(endpoint, "OURS")
    own = ["answer the request yourself" in request["messages"][0]["content"] for request in endpoint.requests]
    assert sorted(own) == [False, False, True, True]


@pytest.mark.parametrize("text", ["", "A>B", "[[A>B]] or [[B>A]]", "[[A>>>B]]", "<think>[[A>B]]", "[[A<B]]"])
def test_games_need_one_label(text: str) -> None:
    assert parse_game(text) is None
