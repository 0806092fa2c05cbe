"""The `nemo-ext rl_tasks` job: writes a file of tasks, generated or from records, and conversations that solve them."""

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
from nemo_ext.rl.tasks.records import SCORES, tasks_from_records
from nemo_ext.rl.verdict import Verdict

COUNT = 1000
"""Default number of generated tasks."""
_WORKED_OUT = ("arithmetic", "tables")
"""Generators whose solutions consist of a derivation, an empty line and the answer."""


def run(config: Mapping[str, Any]) -> None:
    """Write tasks to `output` and, if `solutions` is set, conversations with correct answers to that file.

    Raises:
        ValueError: the config is invalid, or no task can be made.
    """
    settings = checked(TaskSettings, config)
    tasks = _generated(settings) if settings.generator else _from_records(settings)
    if settings.without:
        tasks = _new(tasks, settings.without)
    if settings.thinking is not None:
        share = float(settings.thinking)
        tasks = [replace(task, thinking=uniform(settings.seed, "thinking", task.id) < share) for task in tasks]
    _write(str(settings.output), (task.record() for task in tasks))
    if settings.solutions:
        solve = judged_comparison if settings.records else partial(solved_task, generator=str(settings.generator))
        _write(settings.solutions, (to_record(solve(task)) for task in tasks))


def _generated(config: TaskSettings) -> list[Task]:
    settings = config.settings or {}
    try:
        return list(
            generate(str(config.generator), config.count or COUNT, seed=config.seed, level=config.level, **settings)
        )
    except TypeError as error:
        raise ValueError(
            f"settings={settings} are invalid for generator={config.generator}: {error}; use the settings in "
            "docs/rl/tasks.md"
        ) from None


def _new(tasks: Sequence[Task], files: Sequence[str]) -> list[Task]:
    """Return the tasks whose prompts occur neither in the files nor in an earlier task; ValueError if none remain."""
    taken = {task.prompt for path in files for task in TaskFile(path).tasks}
    known = len(taken)
    new = []
    for task in tasks:
        if task.prompt not in taken:
            taken.add(task.prompt)
            new.append(task)
    if not new:
        raise ValueError(
            f"without={', '.join(files)}: the prompts of all {len(tasks):,} tasks occur in these files; raise count"
        )
    print(
        f"skipped: {len(tasks) - len(new):,} of {len(tasks):,} tasks, whose prompts occur in an earlier task or among "
        f"the {known:,} prompts of the files in without"
    )
    return new


def _from_records(settings: TaskSettings) -> list[Task]:
    report = ConversationReport()
    tasks = list(islice(tasks_from_records(str(settings.environment), list(settings.records), report), settings.count))
    if report.skipped:
        print(f"skipped: {report.summary()}")
    if not tasks:
        files = ", ".join(settings.records)
        raise ValueError(
            f"records={files}: none of the {report.records:,} records can be made into a task for "
            f"environment={settings.environment}; choose other files"
        )
    return tasks


def solved_task(task: Task, generator: str) -> Sample:
    """Return a training conversation that solves a task from the generator of this name.

    With thinking on, a derivation in the solution becomes the response's reasoning.
    """
    answer = import_module(GENERATORS[generator]).solution(task)
    if isinstance(answer, tuple):
        messages = list(_calling(task, answer))
    else:
        work, _, last = answer.rpartition("\n\n") if task.thinking and generator in _WORKED_OUT else ("", "", answer)
        messages = [Message(role="assistant", reasoning=work or None, content=last)]
    return Sample(
        id=task.id, messages=(*task.prompt, *messages), tools=task.tools, task=task.domain, thinking=task.thinking
    )


def judged_comparison(task: Task) -> Sample:
    """Return a training conversation whose prompt is a comparison and whose response is the judgement in the data.

    Raises:
        ValueError: the task's reference does not have all scores.
    """
    if missing := [key for key in SCORES if task.reference.get(key) is None]:
        raise ValueError(
            f"solutions: task {task.id} has no {', '.join(missing)}: use records with all scores, or remove solutions"
        )
    answer = json.dumps({key: task.reference[key] for key in SCORES})
    messages = (*task.prompt, Message(role="assistant", content=answer))
    return Sample(id=task.id, messages=messages, task=task.domain, thinking=task.thinking)


def _calling(task: Task, calls: tuple[ToolCall, ...]) -> Iterator[Message]:
    """Yield the messages of a solution with tools: questions to the user, all calls with results, and a final message.

    In a single-turn environment, yield only the message with the calls.
    """
    numbered = tuple(replace(call, id=call.id or f"call_{number}") for number, call in enumerate(calls))
    environment = make(task.environment)
    if environment.begin is None:
        yield Message(role="assistant", tool_calls=numbered)
        return
    conversation = environment.begin(environment.check(task.reference))
    questions = [Message(role="assistant", content="Could you tell me more?") for _ in task.reference.get("user", ())]
    answer = str(task.reference.get("answer") or "Done.")
    last = Message(role="assistant", content=f"\\boxed{{{answer}}}" if environment.verify else answer)
    for message in (*questions, Message(role="assistant", tool_calls=numbered), last):
        yield message
        yield from conversation.step(
            Response(text=message.content, answer=message.content, tool_calls=message.tool_calls)
        )
    verdict = conversation.verdict()
    assert isinstance(verdict, Verdict)
    assert verdict.outcome == "correct", f"{task.id}: {verdict.reason}"


def _write(path: str, records: Iterator[Mapping[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_text(Path(path).expanduser(), "\n".join(lines) + "\n")
    print(f"{len(lines):,} records: {path}")
