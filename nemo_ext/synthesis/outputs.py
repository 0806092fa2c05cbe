"""Output files: records made from a step's rows, and validated for the job that will read them."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nemo_ext.chat.formats import to_sample
from nemo_ext.data.preference.records import RecordKeys, to_group
from nemo_ext.job.made_of import digest
from nemo_ext.rl.environments import make
from nemo_ext.rl.task import Task
from nemo_ext.synthesis.context import Context
from nemo_ext.synthesis.expressions import TEMPLATES, words
from nemo_ext.synthesis.rows import ID, Row, written
from nemo_ext.synthesis.settings import OutputKind, OutputSettings

READERS: Mapping[OutputKind, str] = {
    "conversations": "nemo-ext sft_data 'sources=[{{name: {name}, path: {path}}}]' template=nemotron3_nano output={to}",
    "generations": "nemo-ext preference_data 'sources={{{name}: {{kind: {pairing}, path: {path}}}}}' output={to}",
    "tasks": "nemo-ext rl preset=rl_zero model=FOLDER 'tasks.train.path={path}' run_dir={to}",
    "documents": "nemo-ext curate preset=dolma 'input={path}' output={to}",
    "prompts": "nemo-ext synthesize recipe=verified_traces model=FOLDER 'input={path}' output={to}",
}
"""Mapping from output kind to a command that reads such files; FOLDER is a placeholder for a model."""


def write(name: str, settings: OutputSettings, context: Context, path: Path) -> int:
    """Write an output file; records that are invalid for the output's kind are counted as dropped.

    Args:
        name: name of the output.
        settings: settings of the output.
        context: rows to make the records from, and counts.
        path: path of the file.

    Returns:
        Number of words in the file.

    Raises:
        ValueError: an expression fails, or all records are invalid.
    """
    check, seen, first_error, size = _CHECKS[settings.kind], set[str](), "", 0
    with written(path) as put:
        for row in context.read_rows():
            names = context.names(row)

            def value(key: str, source: str, names: Mapping[str, Any] = names) -> Any:
                return TEMPLATES.value(source, names, f"outputs.{name}.{key}", f"row {names['row'][ID]}")

            if settings.where is not None and not value("where", settings.where):
                context.drop(row, "not where")
                continue
            record = {key: value(f"record.{key}", source) for key, source in settings.record.items()}
            record = {key: content for key, content in record.items() if content is not None}
            if settings.once is not None:
                once = digest(value("once", settings.once))
                if once in seen:
                    context.drop(row, "not the first")
                    continue
            try:
                check(record)
            except ValueError as error:
                first_error = first_error or f"row {row[ID]}: {error}"
                context.drop(row, f"invalid for {settings.kind}", str(error))
                continue
            if settings.once is not None:
                seen.add(once)
            put(record)
            size += _words(record)
            context.counts.made += 1
    if first_error and not context.counts.made:
        raise ValueError(
            f"outputs.{name}.record: no record is valid for kind={settings.kind}; first error: {first_error}"
        )
    return size


def _words(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_words, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_words, value))
    return words(value) if isinstance(value, str) else 0


def _conversation(record: Row) -> None:
    sample = to_sample(record, id=str(record.get(ID, "")))
    if not any(message.role == "assistant" for message in sample.messages):
        raise ValueError("messages: expected at least one message with the role assistant")


def _document(record: Row) -> None:
    if not isinstance(record.get("text"), str) or not record["text"].strip():
        raise ValueError("text: expected a non-empty string")


def _prompt(record: Row) -> None:
    if not record.get("question") and not record.get("prompt"):
        raise ValueError("question or prompt: expected a non-empty string")


def _task(record: Row) -> None:
    task = Task.from_record(record)
    _environment(task.environment).check(task.reference)


_environment = cache(make)
_CHECKS: Mapping[OutputKind, Callable[[Row], object]] = {
    "conversations": _conversation,
    "generations": lambda record: to_group(record, RecordKeys(), pairs="chosen" in record),
    "tasks": _task,
    "documents": _document,
    "prompts": _prompt,
}
