"""Prompts with instructions, each with a text that follows them."""

from nemo_ext.rl.environments import make
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.instructions import solution
from tests.rl.verdicts import verdict_on


def outcome(task: Task, answer: str) -> str:
    return verdict_on(make("instructions"), answer, task.reference).outcome


def test_solutions_of_other_tasks_are_wrong_with_many_instructions() -> None:
    tasks = list(generate("instructions", 20, seed=3, level=5))

    assert sum(outcome(task, solution(other)) == "wrong" for task in tasks for other in tasks if task != other) > 300


def test_the_level_is_the_number_of_instructions() -> None:
    for task in generate("instructions", 10, seed=5):
        number = int(task.id.split("/")[2])

        assert len(task.reference["instructions"]) == number
        assert f"\n{number}. " in task.prompt[0].content and f"\n{number + 1}. " not in task.prompt[0].content
