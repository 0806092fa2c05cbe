import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.job.config import compose
from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.job import run as make_tasks
from nemo_ext.rl.tasks.job import solved_task
from nemo_ext.rl.verdict import Verdict
from tests.rl.verdicts import verdict_on

NAMES = ("arithmetic", "tables", "schemas", "instructions", "conversations", "long_documents", "tool_calls")

ENVIRONMENTS = ("math", "multiple_choice", "structured_output", "instructions", "contains", "tool_calls")


@pytest.fixture(scope="module")
def environments() -> dict[str, Environment]:
    return {name: make(name) for name in ENVIRONMENTS}


def verdict(environments: dict[str, Environment], task: Task, given: str | tuple[ToolCall, ...]) -> Verdict:
    response = given if isinstance(given, str) else Response(text="", tool_calls=given)
    return verdict_on(environments[task.environment], response, task.reference)


@pytest.mark.parametrize("name", NAMES)
def test_solutions_are_right_and_other_tasks_solutions_are_not(environments: dict, name: str) -> None:
    solution = import_module(f"nemo_ext.rl.tasks.{name}").solution
    made = list(generate(name, 80, seed=1))
    for task in made:
        assert verdict(environments, task, solution(task)).outcome == "correct", task
    swapped = [verdict(environments, task, solution(made[place - 1])).score for place, task in enumerate(made)]
    assert sum(swapped) < len(made) / 3


@pytest.mark.parametrize("name", [*NAMES, "bank", "workplace", "python_tool"])
def test_tasks_depend_on_seed_level_and_number_alone(name: str) -> None:
    many = list(generate(name, 20, seed=1))
    assert list(generate(name, 7, seed=1)) == many[:7]
    assert len({task.id for task in many}) == 20
    assert [task.prompt for task in generate(name, 20, seed=2)] != [task.prompt for task in many]
    assert len({task.prompt for task in generate(name, 20, seed=1, level=3)}) == 20


@pytest.mark.parametrize("name", [*NAMES, "bank", "workplace", "python_tool"])
def test_tasks_are_lines_of_a_task_file(name: str) -> None:
    for task in generate(name, 10, seed=1):
        assert Task.from_record(json.loads(json.dumps(task.record()))) == task


@pytest.mark.parametrize("name", [*NAMES, "bank", "workplace", "python_tool"])
def test_levels(name: str) -> None:
    levels = import_module(f"nemo_ext.rl.tasks.{name}").LEVELS
    assert {task.id.split("/")[2] for task in generate(name, levels, seed=1)} == {str(n + 1) for n in range(levels)}
    assert {task.id.split("/")[2] for task in generate(name, 5, seed=1, level=levels)} == {str(levels)}
    for wrong in (0, levels + 1, "hard"):
        with pytest.raises(ValueError, match="level"):
            list(generate(name, 1, seed=1, level=wrong))  # type: ignore[arg-type]


def test_arithmetic_is_right() -> None:
    import sympy

    unknowns = sympy.symbols("x y")

    def equation(text: str) -> sympy.Expr:
        left, right = re.sub(r"(\d)([xy])", r"\1*\2", text.replace("^", "**")).split("=")
        return sympy.sympify(left) - sympy.sympify(right)

    for task in generate("arithmetic", 160, seed=5):
        question = task.prompt[0].content.removesuffix(r" Put the answer in \boxed{}.")
        answer = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", task.reference["answer"])
        numbers = [sympy.Rational(number) for number in re.findall(r"-?\d+(?:/\d+)?", answer)]
        if found := re.fullmatch(r"What is (.*)\?", question):
            assert [sympy.sympify(found[1])] == numbers
        elif found := re.fullmatch(r"Solve (.*) and (.*)\. Give \(x, y\)\.", question):
            assert sympy.solve([equation(found[1]), equation(found[2])]) == dict(zip(unknowns, numbers, strict=True))
        else:
            found = re.fullmatch(r"(?:Solve|Find all solutions of) (.*=.*?)(?: for x\.|\. Give them.*)", question)
            assert found, question
            assert sorted(sympy.solve(equation(found[1]))) == sorted(numbers)


def test_tables_are_right() -> None:
    for task in generate("tables", 100, seed=5):
        table, question, *_ = task.prompt[0].content.split("\n\n")
        (kind, *columns), _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
        cells = {row[0]: dict(zip(columns, map(int, row[1:]), strict=True)) for row in rows}
        named = [
            word for word in re.findall(r"[A-Z]\w+|\d+", question) if word in {*columns, *cells, kind} or word.isdigit()
        ]
        match named:
            case [column, name] if "What is the number" in question and name in cells:
                right = cells[name][column]
            case [_, column] if question.startswith("Which"):
                pick = max if "largest" in question else min
                right = pick(cells, key=lambda name: cells[name][column])
            case [column, limit] if question.startswith("How many"):
                right = sum(row[column] > int(limit) for row in cells.values())
            case [one, other, column] if "difference" in question:
                right = abs(cells[one][column] - cells[other][column])
            case [column, _, best]:
                right = max(cells.values(), key=lambda row: row[best])[column]
            case _:
                pytest.fail(question)
        choices = task.reference["choices"]
        assert choices["ABCD".index(task.reference["answer"])] == str(right), task
        assert len(set(choices)) == 4


@pytest.mark.parametrize("format", ["boxed", "text", "bare"])
def test_arithmetic_in_every_format(environments: dict, format: str) -> None:
    from nemo_ext.rl.tasks.arithmetic import solution

    for task in generate("arithmetic", 16, seed=3, format=format):
        assert verdict(environments, task, solution(task)).outcome == "correct"


def test_the_right_choice_is_spread_over_the_letters() -> None:
    answers = [task.reference["answer"] for task in generate("tables", 200, seed=1)]
    assert all(answers.count(letter) > 25 for letter in "ABCD")


def test_an_unknown_generator_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'arithmetic'"):
        generate("arithmetics", 1, seed=1)


@pytest.mark.parametrize("name", ["arithmetic", "tables"])
def test_with_thinking_on_the_derivation_is_the_trace(environments: dict, name: str) -> None:
    for task in generate(name, 8, seed=1):
        last = solved_task(replace(task, thinking=True), name).messages[-1]
        assert last.reasoning and last.content.startswith("\\boxed{")
        assert verdict(environments, task, last.content).outcome == "correct"
        assert solved_task(replace(task, thinking=False), name).messages[-1].reasoning is None


def test_sums_of_larger_numbers(environments: dict) -> None:
    from nemo_ext.rl.tasks.arithmetic import solution

    made = list(generate("arithmetic", 200, seed=1, level=1, format="bare", largest=19))

    asked = [tuple(map(int, re.findall(r"\d+", task.prompt[0].content))) for task in made]
    assert max(map(max, asked)) == 19
    assert len(set(asked)) > 100
    assert all(task.reference["answer"] == str(sum(pair)) for task, pair in zip(made, asked, strict=True))
    assert all(verdict(environments, task, solution(task)).outcome == "correct" for task in made[:20])
    with pytest.raises(ValueError, match=r"largest=19 applies only to level=1"):
        next(generate("arithmetic", 1, seed=1, level=2, largest=19))


def test_held_out_tasks_have_no_prompt_of_the_training_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generator=arithmetic", "level=1", "count=80"]
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    make_tasks(compose("rl_tasks", [*words, "seed=1", f"output={train}"]))
    make_tasks(compose("rl_tasks", [*words, "seed=2", f"without={train}", f"output={held_out}"]))

    prompts = [
        [json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()]
        for path in (train, held_out)
    ]
    assert not set(prompts[0]) & set(prompts[1])
    assert len(set(prompts[1])) == len(prompts[1])
    assert f"skipped: {80 - len(prompts[1])} of 80 tasks" in capsys.readouterr().out
    with pytest.raises(ValueError, match="raise count"):
        make_tasks(compose("rl_tasks", [*words, "seed=1", f"without={train}", f"output={held_out}"]))
