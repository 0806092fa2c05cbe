"""Tasks of the two worlds: making the right calls is right; skipping or adding one is wrong."""

import importlib
from collections.abc import Iterable
from typing import Any

import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.rl.environments import make
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.worlds import bank, workplace

EXTRA = {
    "workplace": ToolCall(name="delete_email", arguments={"email_id": "email-2"}),
    "bank": ToolCall(name="verify_identity", arguments={"customer_id": "customer-1", "birth_date": "1900-01-01"}),
}
WORLDS = {"workplace": workplace.WORLD, "bank": bank.WORLD}


def outcome(task: Task, calls: Iterable[ToolCall]) -> str:
    environment = make(task.environment, {"max_turns": 20})
    assert environment.begin is not None
    conversation = environment.begin(environment.check(task.reference))
    for call in calls:
        conversation.step(Response(text="", tool_calls=(call,)))
    conversation.step(parse_response("Done."))
    return conversation.verdict().outcome


def made(name: str, count: int, **more: Any) -> list[tuple[Task, tuple[ToolCall, ...]]]:
    module = importlib.import_module(f"nemo_ext.rl.tasks.{name}")
    return [(task, module.solution(task)) for task in generate(name, count, seed=11, **more)]


@pytest.mark.parametrize("name", WORLDS)
def test_a_script_that_makes_the_right_calls(name: str) -> None:
    for task, calls in made(name, 60):
        assert task.tools == WORLDS[name].schemas
        assert outcome(task, calls) == "correct", task.id
        assert outcome(task, calls[:-1]) == "wrong", task.id
        assert outcome(task, calls[1:]) == "wrong", task.id
        assert outcome(task, [*calls, EXTRA[name]]) == "wrong", task.id
        assert outcome(task, []) == "wrong", task.id


def test_the_bank_stays_within_its_turns() -> None:
    """One turn to ask, one to search and verify, one to act, one to report: within five."""
    environment = make("bank")
    assert environment.begin is not None and environment.max_turns == 5
    for task, calls in made("bank", 20, level=3):
        conversation = environment.begin(environment.check(task.reference))
        (answer,) = conversation.step(parse_response("What is your date of birth?"))
        birth_date = calls[0].arguments["birth_date"]

        assert answer.role == "user" and birth_date in answer.content
        assert all(birth_date not in message.content for message in task.prompt)
        conversation.step(Response(text="", tool_calls=calls))
        assert conversation.verdict().outcome == "correct"


def test_levels_grow() -> None:
    for name in WORLDS:
        mean = [sum(len(calls) for _, calls in made(name, 60, level=level)) for level in (1, 3)]
        assert mean[0] < mean[1]
