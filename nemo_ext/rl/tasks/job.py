"""Writes files of tasks, generated or from records, and of conversations that solve generated ones."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from nemo_ext.job.settings import check_keys, checked_share, checked_whole
from nemo_ext.rl.environments import make
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import GENERATORS, generate
from nemo_ext.rl.tasks.records import SCORES, tasks_of

_KEYS = (
    *("generator", "environment", "records", "count", "level", "seed", "settings", "thinking", "without"),
    *("output", "solutions"),
)
COUNT = 1000
"""Default number of generated tasks."""
_WORKED_OUT = ("arithmetic", "tables")
"""Generators whose solution is the work and, after an empty line, the answer."""


def run(config: Mapping[str, Any]) -> None:
    """Write tasks to `output`, and conversations with correct answers to `solutions` if it is given.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    check_keys(config, _KEYS, required=_KEYS, where="rl_tasks")
    if not isinstance(config["output"], str) or not config["output"]:
        raise ValueError(f"output={config['output']}: say the file to write")
    if config["solutions"] == config["output"]:
        raise ValueError(f"solutions={config['solutions']}: the tasks are written there; name another file")
    if config["records"]:
        tasks = _from_records(config)
    elif config["generator"]:
        tasks = _generated(config)
    else:
        raise ValueError("generator=null: say which tasks, or give records=FILES and environment=NAME")
    if config["without"]:
        tasks = _new(tasks, config["without"])
    tasks = [_in_mode(task, config["thinking"], config["seed"]) for task in tasks]
    _write(config["output"], (task.record() for task in tasks))
    if config["solutions"]:
        solve = judged if config["records"] else partial(solved, generator=config["generator"])
        _write(config["solutions"], (to_record(solve(task)) for task in tasks))


def _generated(config: Mapping[str, Any]) -> list[Task]:
    if config["environment"]:
        raise ValueError(
            f"environment={config['environment']}: is for records; generator={config['generator']} has one"
        )
    level = None if config["level"] is None else checked_whole("level", config["level"], least=1)
    seed = checked_whole("seed", config["seed"])
    count = COUNT if config["count"] is None else checked_whole("count", config["count"], least=1)
    settings = config["settings"] or {}
    try:
        return list(generate(config["generator"], count, seed=seed, level=level, **settings))
    except TypeError as error:
        raise ValueError(f"settings={settings}: {error}") from None


def _new(tasks: Sequence[Task], files: object) -> list[Task]:
    """Tasks whose prompt neither a task of the files nor an earlier one has."""
    paths = [files] if isinstance(files, str) else files
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"without={files}: give a file of tasks, or a list of them")
    taken = {task.prompt for path in paths for task in TaskFile(path).tasks}
    there = len(taken)
    kept = []
    for task in tasks:
        if task.prompt not in taken:
            taken.add(task.prompt)
            kept.append(task)
    if not kept:
        raise ValueError(f"without={files}: all {len(tasks):,} tasks have a prompt of these files; raise count")
    print(
        f"left out: {len(tasks) - len(kept):,} of {len(tasks):,} tasks, whose prompt one of the {there:,} tasks of "
        f"without, or an earlier task, has"
    )
    return kept


def _from_records(config: Mapping[str, Any]) -> list[Task]:
    for key in ("generator", "level", "settings"):
        if config[key]:
            raise ValueError(f"{key}={config[key]}: is for generated tasks, not for records")
    if config["solutions"] and config["environment"] != "genrm":
        raise ValueError(f"solutions={config['solutions']}: is for generated tasks and environment=genrm")
    if not isinstance(config["environment"], str):
        raise ValueError(f"environment={config['environment']}: say which tasks to make of the records: chat or genrm")
    given = config["records"]
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(path, str) for path in given)):
        raise ValueError(f"records={given}: give a file, or a list of files and globs")
    report = ConversationReport()
    made: Iterable[Task] = tasks_of(config["environment"], [given] if isinstance(given, str) else given, report)
    if config["count"] is not None:
        made = islice(made, checked_whole("count", config["count"], least=1))
    tasks = list(made)
    if report.skipped:
        print(f"left out: {report.summary()}")
    if not tasks:
        raise ValueError(f"records={given}: none of the {report.records:,} records gives a task")
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


def _in_mode(task: Task, thinking: object, seed: int) -> Task:
    if thinking is None:
        return task
    share = float(thinking) if isinstance(thinking, bool) else checked_share("thinking", thinking)
    return replace(task, thinking=uniform(seed, "thinking", task.id) < share)


def _write(path: str, records: Iterator[Mapping[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    write_text(Path(path).expanduser(), "\n".join(lines) + "\n")
    print(f"{len(lines):,} records: {path}")
