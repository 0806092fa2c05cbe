"""Conversations: the instructions in force at the end are the ones in the messages, parsed independently."""

import pytest

from nemo_ext.rl.environments import make
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate
from tests.rl.verdicts import verdict_on


def outcome(task: Task, answer: str) -> str:
    return verdict_on(make("instructions"), answer, task.reference).outcome


def held(task: Task) -> list[str]:
    """Instructions in force after the last message, parsed from the messages alone."""
    first, *changes = (message.content for message in task.prompt if message.role == "user")
    lines = [line.partition(". ")[2] for line in first.splitlines()[1:]]
    for message in changes:
        match message.splitlines():
            case ["Write it anew. All that holds still holds, and this is new:", new]:
                lines.append(new)
            case ["Write it anew. Instead of this:", old, "I want this:", new, "The rest still holds."]:
                lines[lines.index(old)] = new
            case ["Write it anew. This no longer holds:", old, "The rest does."]:
                lines.remove(old)
            case _:
                pytest.fail(message)
    return lines


def test_the_reference_matches_the_messages() -> None:
    environment = make("instructions")
    for task in generate("conversations", 60, seed=3):
        parsed = environment.check(task.reference)

        assert [each.says() for each in parsed.instructions] == held(task)


def test_neither_the_previous_answer_nor_the_last_message_alone_is_enough() -> None:
    for task in generate("conversations", 60, seed=4):
        changes = int(task.id.split("/")[2])

        assert [message.role for message in task.prompt] == ["user", "assistant"] * changes + ["user"]
        assert outcome(task, task.prompt[-2].content) == "wrong"
        assert outcome(task, "The morning brings a new story.") == "wrong"
