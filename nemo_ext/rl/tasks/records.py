"""Tasks made from existing records: prompts of conversations, and comparisons for training a reward model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_ext.chat.formats import FormatError, to_sample
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.data.sft.sources import ConversationReport, ConversationSource
from nemo_ext.data.text.user_files import value_at
from nemo_ext.job.settings import nearest
from nemo_ext.rl.environments import GYM, make
from nemo_ext.rl.gym_servers import GymServer, gym_server, gym_task
from nemo_ext.rl.rewards.genrm import instructed_messages
from nemo_ext.rl.task import Task

_RECORDS, _BYTES = 100_000, 64 << 20
ROLES = ("response_1", "response_2")
SCORES = ("score_1", "score_2", "ranking")
"""Keys of a judgement in a record."""


def tasks_from_records(environment: str, paths: Sequence[str], report: ConversationReport) -> Iterator[Task]:
    """Yield one task per record, in file order; skipped records are counted in `report`.

    chat      conversations in any format of `nemo-ext sft_data`; the prompt is everything up to the last user message
    genrm     `genrm_*.jsonl` from `nemo-ext preference_data`: two responses, with instructions to compare them
    python_tool    tasks of the environment `math`, which get Python as a tool
    terminal  tasks of the environment `terminal`, which get the shell as a tool
    gym-NAME  rows of one of NeMo Gym's own environments (`nemo_ext.rl.gym_servers`)

    Args:
        environment: environment of the tasks: chat, genrm, python_tool, terminal or gym-NAME.
        paths: paths and globs of JSONL or Parquet files; for gym-NAME, Gym's example rows if there are none.
        report: counts of skipped records, which are updated.

    Raises:
        ValueError: the environment does not support tasks from records, or a file cannot be read.
    """
    reader = _READERS.get(environment)
    if environment.startswith(GYM):
        server = gym_server(environment)
        reader = partial(_rows, server=server)
        if not paths and server.examples is None:
            raise ValueError(f"records=[]: NeMo Gym has no example rows of {environment}; set records=FILES")
        paths = paths or [str(server.examples)]
    if reader is None:
        known = nearest(environment, (*_READERS, f"{GYM}NAME"))
        raise ValueError(f"environment={environment!r} does not support tasks from records: {known}")
    source = ConversationSource(name=environment, path=tuple(paths))
    seen: set[str] = set()
    for part in source.parts(max_documents=_RECORDS, max_size=_BYTES):
        for task, where in reader(source, part, report):
            if task.id in seen:
                report.skip("with a duplicate id", where)
                continue
            seen.add(task.id)
            yield task


def _chats(source: ConversationSource, part: Any, report: ConversationReport) -> Iterator[tuple[Task, str]]:
    for sample, where, _ in source.read(part, report):
        prompt = _prompt(sample)
        if not prompt or not prompt[-1].content.strip():
            report.skip("without a prompt", where)
            continue
        if sample.tools:
            report.skip("with tools, whose calls would be hidden from the judge", where)
            continue
        domain = sample.task or "chat"
        yield (
            Task(id=sample.id, environment="chat", prompt=prompt, domain=domain, thinking=sample.thinking),
            where,
        )


def _prompt(sample: Sample) -> tuple[Message, ...]:
    """Return the messages up to the last user message; empty if there is none."""
    asked = [place for place, message in enumerate(sample.messages) if message.role == "user"]
    return sample.messages[: asked[-1] + 1] if asked else ()


def _comparisons(source: ConversationSource, part: Any, report: ConversationReport) -> Iterator[tuple[Task, str]]:
    for number, record in source.files.records(part, report):
        where = source.files.place(part, number)
        try:
            yield _comparison(record), where
        except ValueError as error:
            report.skip("schema", f"{where}: {error}")


def _comparison(record: Mapping[str, Any]) -> Task:
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise FormatError("messages: expected a list of messages")
    if (last := [message.get("role") for message in messages[-2:]]) != list(ROLES):
        raise FormatError(f"messages: the last two roles must be {' and '.join(ROLES)}, not {last}")
    identifier = value_at(record, "id")
    if not isinstance(identifier, str) or not identifier:
        raise FormatError(f"id={identifier!r}: expected a non-empty string")
    answers = [{**message, "role": "assistant"} for message in messages[-2:]]
    *prompt, first, second = to_sample(
        {"messages": [*messages[:-2], *answers]}, id=identifier, format="openai"
    ).messages
    if not prompt or not prompt[-1].content.strip():
        raise FormatError("messages: expected a non-empty prompt before the two responses")
    task = record.get("task") or "genrm"
    if not isinstance(task, str):
        raise FormatError(f"task={task!r}: expected a string")
    reference = {key: record.get(key) for key in SCORES if record.get(key) is not None}
    make("genrm").check(reference)
    (instruction,) = instructed_messages(prompt, first.content, second.content)
    return Task(
        id=identifier,
        environment="genrm",
        prompt=(Message(role="user", content=instruction["content"]),),
        reference=reference,
        domain=task,
    )


def _rows(
    source: ConversationSource, part: Any, report: ConversationReport, *, server: GymServer
) -> Iterator[tuple[Task, str]]:
    for number, row in source.files.records(part, report):
        where = source.files.place(part, number)
        yield gym_task(row, server, where), where


def _with_tools(
    source: ConversationSource, part: Any, report: ConversationReport, *, before: str
) -> Iterator[tuple[Task, str]]:
    tools = make(source.name).tools
    for number, record in source.files.records(part, report):
        where = source.files.place(part, number)
        try:
            task = Task.from_record(record)
        except ValueError as error:
            report.skip("schema", f"{where}: {error}")
            continue
        if task.environment != before or task.tools:
            report.skip(f"of another environment than {before}, or with tools", where)
            continue
        yield replace(task, environment=source.name, tools=tools), where


_Reader = Callable[[ConversationSource, Any, ConversationReport], Iterator[tuple[Task, str]]]
_READERS: Mapping[str, _Reader] = {
    "chat": _chats,
    "genrm": _comparisons,
    "python_tool": partial(_with_tools, before="math"),
    "terminal": partial(_with_tools, before="terminal"),
}
