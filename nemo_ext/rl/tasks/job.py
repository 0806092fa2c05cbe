"""Writes files of tasks, generated or from records, and of conversations that solve generated ones."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_ext.chat.formats import to_record
from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.sft.sources import ConversationReport
from nemo_ext.job.files import write_text
from nemo_ext.job.seeds import uniform
from nemo_ext.job.settings import checked
from nemo_ext.rl.environments import make
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.settings import TaskSettings
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import GENERATORS, generate
from nemo_ext.rl.tasks.records import SCORES, tasks_of

COUNT = 1000
"""Default number of generated tasks."""
_WORKED_OUT = ("arithmetic", "tables")
"""Generators whose solution is the work and, after an empty line, the answer."""


def run(config: Mapping[str, Any]) -> None:
    """Write tasks to `output`, and conversations with correct answers to `solutions` if it is given.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    given = checked(TaskSettings, config)
    tasks = _from_records(given) if given.records else _generated(given)
    if given.without:
        tasks = _new(tasks, given.without)
    if given.thinking is not None:
        share = float(given.thinking)
        tasks = [replace(task, thinking=uniform(given.seed, "thinking", task.id) < share) for task in tasks]
    _write(str(given.output), (task.record() for task in tasks))
    if given.solutions:
        solve = judged if given.records else partial(solved, generator=str(given.generator))
        _write(given.solutions, (to_record(solve(task)) for task in tasks))


def _generated(given: TaskSettings) -> list[Task]:
    settings = given.settings or {}
    try:
        return list(
            generate(str(given.generator), given.count or COUNT, seed=given.seed, level=given.level, **settings)
        )
    except TypeError as error:
        raise ValueError(f"settings={settings}: {error}") from None


def _new(tasks: Sequence[Task], files: Sequence[str]) -> list[Task]:
    """Tasks whose prompt neither a task of the files nor an earlier one has."""
    taken = {task.prompt for path in files for task in TaskFile(path).tasks}
    there = len(taken)
    kept = []
    for task in tasks:
        if task.prompt not in taken:
            taken.add(task.prompt)
            kept.append(task)
    if not kept:
        raise ValueError(
            f"without={', '.join(files)}: all {len(tasks):,} tasks have a prompt of these files; raise count"
        )
    print(
        f"left out: {len(tasks) - len(kept):,} of {len(tasks):,} tasks, whose prompt one of the {there:,} tasks of "
        f"without, or an earlier task, has"
    )
    return kept


def _from_records(given: TaskSettings) -> list[Task]:
    report = ConversationReport()
    tasks = list(islice(tasks_of(str(given.environment), list(given.records), report), given.count))
    if report.skipped:
        print(f"left out: {report.summary()}")
    if not tasks:
        files = ", ".join(given.records)
        raise ValueError(f"records={files}: none of the {report.records:,} records gives a task")
    return tasks


def solved(task: Task, generator: str) -> Sample:
    """Training conversation of a task with a correct answer; with thinking on, its work is the trace."""
    answer = import_module(GENERATORS[generator]).solution(task)
    if isinstance(answer, tuple):
        messages = list(_calling(task, answer))
    else:
        work, _, last = answer.rpartition("\n\n") if task.thinking and generator in _WORKED_OUT else ("", "", answer)
        messages = [Message(role="assistant", reasoning=work or None, content=last)]
    return Sample(
        id=task.id, messages=(*task.prompt, *messages), tools=task.tools, task=task.domain, thinking=task.thinking
    )


def judged(task: Task) -> Sample:
    """Training conversation of a comparison with the judgement of the data, as a model learns to give one.

    Raises:
        ValueError: the data have no score of one of the responses.
    """
    if missing := [key for key in SCORES if task.reference.get(key) is None]:
        raise ValueError(f"solutions: {task.id} has no {', '.join(missing)}: take records with all scores")
    answer = json.dumps({key: task.reference[key] for key in SCORES})
    messages = (*task.prompt, Message(role="assistant", content=answer))
    return Sample(id=task.id, messages=messages, task=task.domain, thinking=task.thinking)


def _calling(task: Task, calls: tuple[ToolCall, ...]) -> Iterator[Message]:
    """Questions while the user has more to say, all calls with the world's answers, and a last message.

    The calls alone where the environment has a single turn.
    """
    numbered = tuple(replace(call, id=call.id or f"call_{number}") for number, call in enumerate(calls))
    environment = make(task.environment)
    if environment.begin is None:
        yield Message(role="assistant", tool_calls=numbered)
        return
    conversation = environment.begin(environment.check(task.reference))
    questions = [Message(role="assistant", content="Could you tell me more?") for _ in task.reference.get("user", ())]
    last = Message(role="assistant", content=str(task.reference.get("answer") or "Done."))
    for message in (*questions, Message(role="assistant", tool_calls=numbered), last):
        yield message
        yield from conversation.step(
            Response(text=message.content, answer=message.content, tool_calls=message.tool_calls)
        )
    verdict = conversation.verdict()
    assert verdict.outcome == "correct", f"{task.id}: {verdict.reason}"


def _write(path: str, records: Iterator[Mapping[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_text(Path(path).expanduser(), "\n".join(lines) + "\n")
    print(f"{len(lines):,} records: {path}")
