import re

import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.environments import make
from nemo_ext.rl.rewards.named import Facts, reward_of
from nemo_ext.rl.task import Task
from nemo_ext.rl.verifiers.genrm import check, verify
from tests.rl.verdicts import verdict_on

TRUTH = {"score_1": 4, "score_2": 2, "ranking": 2}


def judged(first: float, second: float, ranking: float) -> str:
    return f'Some words.\n{{"score_1": {first}, "score_2": {second}, "ranking": {ranking}}}'


@pytest.mark.parametrize(
    ("text", "outcome", "reward"),
    [
        (judged(4, 2, 2), "correct", 0),
        (judged(5, 4, 3), "correct", -4),
        ("<think>the first</think>" + judged(4, 2, 2), "correct", 0),
        (judged(2, 4, 5), "wrong", -7),
        (judged(4, 2, 3.5), "wrong", -1.5),
        (judged(4, 2, 7), "wrong", -10),
        (judged(4, 2, 2) + judged(2, 4, 5), "wrong", -7),
        (judged(4, 2, 2) + judged(2, 4, 5) + " or so", "wrong", -10),
        ("<think>" + judged(4, 2, 2), "wrong", -10),
        ("", "wrong", -10),
    ],
)
def test_the_side_decides_and_the_distance_is_the_reward(text: str, outcome: str, reward: float) -> None:
    response = parse_response(text)
    verdict = verify(response, check(TRUTH))
    task = Task(id="t", environment="genrm", prompt=(), reference=TRUTH)
    earned = reward_of("genrm_training").score(verdict, response, Facts.from_task(task, thinking_opened=False))

    assert (verdict.outcome, earned.total) == (outcome, reward)


def test_unknown_scores_add_no_term() -> None:
    task = Task(id="t", environment="genrm", prompt=(), reference={"ranking": 2})
    response = parse_response(judged(1, 5, 3))
    reward = reward_of({"name": "genrm_training", "ranking_weight": 2})

    assert verify(response, check(task.reference)).outcome == "correct"
    assert (
        reward.score(verify(response, check(TRUTH)), response, Facts.from_task(task, thinking_opened=False)).total == -2
    )


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ({}, "ranking"),
        ({"ranking": None}, "reference.ranking=None"),
        ({"ranking": 7}, "reference: ranking=7.0: expected a ranking from 1 to 6"),
        ({**TRUTH, "score_1": 0}, "reference: score_1=0.0: expected a score from 1 to 5"),
        ({**TRUTH, "score_2": "4"}, "reference.score_2='4'"),
        ({**TRUTH, "scores": 4}, "did you mean"),
    ],
)
def test_invalid_references_are_refused(reference: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check(reference)


def test_a_chat_has_no_reference_and_requires_an_answer() -> None:
    chat = make("chat")

    assert chat.judged_in_groups
    outcomes = [verdict_on(chat, text, {}).outcome for text in ("Hello.", "", "<think>hm")]
    assert outcomes == ["correct", "wrong", "wrong"]
    with pytest.raises(ValueError, match="reference"):
        chat.check({"answer": "42"})
