"""Questions about long texts; the texts are tested in tests/evaluation/test_generators.py."""

import pytest

from nemo_ext.job.seeds import generator
from nemo_ext.rl.environments import make
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.long_documents import LEVELS, solution
from nemo_ext.rl.tasks.words import unseen
from tests.rl.verdicts import verdict_on


def test_the_answers_alone_are_right() -> None:
    environment = make("contains")
    for task in generate("long_documents", 4 * LEVELS, seed=2, length=[256, 1024]):
        answer = solution(task)
        wrong = [
            f"{answer}, {task.reference['wrong'][0]}",
            task.reference["wrong"][-1],
            task.prompt[0].content,
            "",
            *([answer.rpartition(", ")[0]] if ", " in answer else []),
        ]

        assert verdict_on(environment, f"It is {answer}.", task.reference).outcome == "correct"
        for text in wrong:
            assert verdict_on(environment, text, task.reference).outcome == "wrong", text


@pytest.mark.parametrize("level", range(1, LEVELS + 1))
def test_a_text_has_the_requested_length(level: int) -> None:
    for length in (1024, 4096):
        (task,) = generate("long_documents", 1, seed=1, level=level, length=length)

        assert 0.75 * 4 * length < len(task.prompt[0].content) < 1.1 * 4 * length + 800


def test_a_level_has_the_same_tasks_in_turn_and_alone() -> None:
    turns = list(generate("long_documents", 2 * LEVELS, seed=1, length=128))

    for level in range(1, LEVELS + 1):
        assert turns[level - 1 :: LEVELS] == list(generate("long_documents", 2, seed=1, level=level, length=128))


def test_names_do_not_run_out() -> None:
    random, seen = generator(1, "names"), set[str]()

    names = [unseen(random, seen, 1) for _ in range(200)]  # there are fewer syllables

    assert len(set(names)) == 200 == len(seen)


def test_wrong_lengths_are_named() -> None:
    with pytest.raises(ValueError, match=r"settings\.length must be a whole number of at least 128"):
        list(generate("long_documents", 1, seed=1, length=5))
