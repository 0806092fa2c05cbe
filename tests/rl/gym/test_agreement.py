"""Rewards of our servers on the rollouts that NeMo Gym ships, compared with its own servers."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.json_lines import read_jsonl
from tests.rl.gym_data import gym_data

pytestmark = pytest.mark.gym

Serve = Callable[..., Any]


def prompt(record: dict[str, Any]) -> str:
    asked = record["responses_create_params"]["input"]
    return str([message["content"] for message in asked if message.get("role") == "user"])


def rewards(
    serve: Serve, server: str, *, reward: str = "reward", **config: Any
) -> tuple[list[tuple[float, float]], list[tuple[str, float]]]:
    """Our reward and Gym's for each shipped rollout, and our errors with Gym's rewards for refused rows."""
    examples = {prompt(record): record for record in read_jsonl(gym_data(server) / "example.jsonl")}
    client, made, refused = serve(**config), [], []
    for record in read_jsonl(gym_data(server) / "example_rollouts.jsonl"):
        row = examples.get(prompt(record), {}) | record
        # Some come from an older Gym, which wrote null for defaults.
        for part in ("responses_create_params", "response"):
            row[part] = {key: value for key, value in row[part].items() if value is not None}
        answer = client.post("/verify", json=row)
        if answer.status_code == 422:
            refused.append((answer.json()["detail"], record[reward]))
        else:
            made.append((answer.json()["reward"], record[reward]))
    return made, refused


MATH = {"environment": "math", "settings": {"time_limit": 60}}
CODE = {"environment": "code"}
CALLS = {"environment": "tool_calls"}
ONE_OF_TWO = "single_step_tool_use_with_argument_comparison"


@pytest.mark.parametrize(
    ("server", "config", "reward"),
    [
        pytest.param("math_with_judge", MATH, "library_reward", marks=pytest.mark.slow),  # sympy takes seconds for one
        ("mcqa", {"environment": "multiple_choice"}, "reward"),
        ("code_gen", CODE, "reward"),
        (ONE_OF_TWO, CALLS, "reward"),
    ],
)
def test_rewards_match_gym(serve: Serve, server: str, config: dict[str, Any], reward: str) -> None:
    made, refused = rewards(serve, server, reward=reward, **config)

    assert not refused and len(made) == 5 and {theirs for _, theirs in made} == {0, 1}
    assert [ours for ours, _ in made] == [theirs for _, theirs in made]


def test_unsolvable_tasks_are_refused_instead_of_earning_nothing(serve: Serve) -> None:
    made, refused = rewards(serve, "xlam_fc", **CALLS)

    assert [ours for ours, _ in made] == [theirs for _, theirs in made] and len(made) == 4
    ((why, theirs),) = refused
    assert "is not of type 'string'" in why and theirs == 0


def test_verdicts_on_instructions_match_gym(serve: Serve) -> None:
    made, refused = rewards(serve, "instruction_following", environment="instructions")

    assert not refused and len(made) == 5 and {theirs for _, theirs in made} == {0, 1}
    # One paragraph begins "Crash—emotion": the check that Gym imports takes this for one word.
    assert [place for place, (ours, theirs) in enumerate(made) if ours != theirs] == [3]
