"""Requests for tool calls: the expected calls are right in every format, and any other calls are wrong."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.formats import to_sample
from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Sample, ToolCall
from nemo_ext.chat.template import Template
from nemo_ext.job.config import compose
from nemo_ext.rl.environments import make
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.job import run, solved_task
from nemo_ext.rl.tasks.tool_calls import solution
from tests.rl.verdicts import verdict_on


def outcome(task: Task, response: Response) -> str:
    return verdict_on(make("tool_calls"), response, task.reference).outcome


def made(calls: Sequence[ToolCall]) -> Response:
    return Response(text="", tool_calls=tuple(calls), answer="" if calls else "I cannot.")


def expected(task: Task) -> list[ToolCall]:
    given = solution(task)
    return [] if isinstance(given, str) else list(given)


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case [first, *rest]:
            return [changed(first), *rest]
        case dict():
            return {**value, "quantity": value["quantity"] + 1}
    raise AssertionError(value)


def mistakes(calls: list[ToolCall]) -> Iterator[list[ToolCall]]:
    """Calls with one of them missing, duplicated or with a different argument."""
    for place, call in enumerate(calls):
        yield [*calls[:place], *calls[place + 1 :]]
        yield [*calls, call]
        for name, value in call.arguments.items():
            other = replace(call, arguments={**call.arguments, name: changed(value)})
            yield [*calls[:place], other, *calls[place + 1 :]]


@pytest.mark.parametrize("level", range(1, 6))
def test_only_the_expected_calls_are_right(level: int) -> None:
    for task in generate("tool_calls", 15, seed=2, level=level):
        calls = expected(task)

        assert outcome(task, made(calls)) == "correct", task.id
        for wrong in mistakes(calls):
            assert outcome(task, made(wrong)) == "wrong", (task.id, wrong)
        turned = outcome(task, made(calls[::-1]))
        assert turned == ("wrong" if level == 4 else "correct"), task.id
        assert outcome(task, parse_response("I cannot do that.")) == ("wrong" if calls else "correct")


@pytest.mark.parametrize("name", ["nemotron3_nano", "domyn", "llama_nemotron", "olmo3"])
def test_calls_are_right_as_each_template_writes_them(name: str) -> None:
    template = Template.load(name)
    for task in generate("tool_calls", 25, seed=3):
        prompt = Sample(id=task.id, messages=task.prompt, tools=task.tools)
        before = template.render(prompt, thinking=False, add_generation_prompt=True).text
        whole = template.render(solved_task(task, "tool_calls"), thinking=False).text

        assert whole.startswith(before)
        answer = re.split(r"<\|(?:im_end|eot_id|endoftext)\|>", whole.removeprefix(before))[0]
        assert outcome(task, parse_response(answer)) == "correct", answer


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif not isinstance(value, bool):
        yield value


def test_every_value_is_in_the_request() -> None:
    for task in generate("tool_calls", 200, seed=5):
        wish = task.prompt[-1].content.casefold()
        for call in expected(task):
            assert all(str(value).casefold() in wish for value in leaves(dict(call.arguments))), task.id


def test_levels() -> None:
    tools, calls, wishes = (
        {level: {size(task) for task in generate("tool_calls", 40, seed=6, level=level)} for level in range(1, 6)}
        for size in (
            lambda task: len(task.tools),
            lambda task: len(task.reference["expected"]),
            lambda task: len(task.prompt[-1].content.removeprefix("In this order:\n").splitlines()),
        )
    )
    assert tools == {1: {1}, 2: {5}, 3: {6}, 4: {8}, 5: {6}}
    assert calls == {1: {1}, 2: {1}, 3: {2, 3}, 4: {3, 4}, 5: {0, 1, 2}}
    assert wishes == {1: {1}, 2: {1}, 3: {2, 3}, 4: {3, 4}, 5: {2, 3}}


def test_solutions_are_conversations(tmp_path: Path) -> None:
    files = {"output": tmp_path / "tasks.jsonl", "solutions": tmp_path / "chats.jsonl"}

    run(compose("rl_tasks", ["generator=tool_calls", "count=10", *(f"{key}={path}" for key, path in files.items())]))

    chats = [json.loads(line) for line in files["solutions"].read_text().splitlines()]
    for task, chat in zip(TaskFile(files["output"]).tasks, chats, strict=True):
        sample = to_sample(chat, id=task.id, format="openai")
        assert sample.messages[:-1] == task.prompt and sample.tools == task.tools
        assert outcome(task, made(sample.messages[-1].tool_calls)) == "correct"
