"""Conversations from files: JSONL (plain, .gz, .zst) and Parquet, streamed part by part.

A record that is not a conversation is skipped and counted with its place, as `malformed` (not a JSON object) or
`schema` (`FormatError`). A file that cannot be read to its end is an error, since an unknown part of it is missing.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic.dataclasses import dataclass

from nemo_ext.chat.formats import (
    MODE_LINE,
    Format,
    FormatError,
    optional_text,
    thinking_mode,
    to_sample,
    without_mode_line,
)
from nemo_ext.chat.sample import Sample
from nemo_ext.data.text.documents import Part, ReadReport
from nemo_ext.data.text.user_files import RecordSource, record_source, value_at
from nemo_ext.job.settings import STRICT, Strings, checked, prefixed_errors

_CHECKED_RECORDS = 1000
_CHECKED_BYTES = 1 << 20


class Located(NamedTuple):
    """A sample, its place in the input (for messages), and the number of its record in the file."""

    sample: Sample
    where: str
    number: int = 0


@plain_dataclass
class ConversationReport(ReadReport):
    """Counts of a reader of conversations, including ignored message keys and corrections, each keyed by kind."""

    ignored: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, other: ReadReport) -> None:
        super().add(other)
        if isinstance(other, ConversationReport):
            self.ignored.update(other.ignored)
            self.changed.update(other.changed)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConversationSource:
    """Files with one conversation per record. Keys may be paths such as `metadata.task`.

    Attributes:
        name: name of the source, in reports and shares.
        path: files and globs.
        kind: kind of the files; by default inferred from their names.
        format: format of the records; `auto` detects it for each record.
        id_key: key of the id; records without an id get a digest of their content.
        task_key: key of the task.
        language_key: key of the language.
        thinking_key: key of the mode: on, off, true, false, `detailed thinking on` ... A mode line in the system
            message is read as well.
        task: default task, for records without one.
        language: default language.
        thinking: default mode.
    """

    name: str
    path: Strings
    kind: Literal["jsonl", "parquet"] | None = None
    format: Format = "auto"
    id_key: str = "id"
    task_key: str = "task"
    language_key: str = "language"
    thinking_key: str = "thinking"
    task: str = ""
    language: str = ""
    thinking: bool | None = None

    @cached_property
    def files(self) -> RecordSource:
        """Reader of the records in the files."""
        return record_source(self.path, self.kind, f"source {self.name}")

    def check(self) -> list[tuple[str, Path]]:
        """Check the first records of each input file; return (name, path) of each file.

        Raises:
            ValueError: a file is missing or cannot be read, or none of its first records is a conversation.
        """
        files = self.files
        with prefixed_errors(f"source {self.name}"):
            inputs = files.inputs()
            for _, path in inputs:
                alone = replace(files, path=(str(path),))
                alone.check_files()
                report = ConversationReport()
                for part in islice(alone.parts(max_documents=_CHECKED_RECORDS, max_size=_CHECKED_BYTES), 1):
                    if next(self.read(part, report), None) is None and report.records:
                        raise ValueError(
                            f"none of the first {report.records} records of {path} is a conversation "
                            f"({report.summary(examples=1)}); set path to files of conversations, or correct format "
                            "or keys"
                        )
        return inputs

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        """Split the files into separately read parts; see `nemo_ext.data.text.documents.Source.parts`."""
        for name, path in self.files.inputs():
            if path.stat().st_size == 0:
                yield Part(name=name, path=str(path), size=0, documents=0)
        yield from self.files.parts(max_documents=max_documents, max_size=max_size)

    def read(self, part: Part, report: ConversationReport, *, mode_lines: bool = False) -> Iterator[Located]:
        """Yield the samples of one part in order; skipped records are counted in `report`.

        Args:
            mode_lines: True to keep lines such as `detailed thinking on` in system messages, for a template that does
                not state the mode itself.

        Raises:
            ValueError: the file cannot be read to its end.
        """
        if part.size == 0:
            report.skip("empty file", part.path)
            return
        for number, record in self.files.records(part, report):
            where = self.files.place(part, number)
            try:
                sample = self._sample(record, report, mode_lines=mode_lines)
            except FormatError as error:
                report.skip("schema", f"{where}: {error}")
                continue
            yield Located(sample, where, number)

    def _sample(self, record: Mapping[str, Any], report: ConversationReport, *, mode_lines: bool) -> Sample:
        identifier = value_at(record, self.id_key)
        if isinstance(identifier, int) and not isinstance(identifier, bool):
            identifier = str(identifier)
        thinking = thinking_mode(value_at(record, self.thinking_key), self.thinking_key)
        sample = to_sample(
            record,
            id=optional_text(identifier, self.id_key) or _digest(record),
            format=self.format,
            source=self.name,
            task=optional_text(value_at(record, self.task_key), self.task_key) or self.task,
            language=optional_text(value_at(record, self.language_key), self.language_key).lower() or self.language,
            thinking=thinking,
            ignored=report.ignored,
            changed=report.changed,
        )
        plain = without_mode_line(sample)
        if plain is not sample:
            report.changed[MODE_LINE] += not mode_lines
            sample = replace(sample, thinking=plain.thinking) if mode_lines else plain
        return sample if sample.thinking is not None else replace(sample, thinking=self.thinking)


def load_conversations(config: Mapping[str, Any]) -> ConversationSource:
    """Build the source described by a config.

    Raises:
        ValueError: a key is unknown or invalid; the message suggests the nearest known key.
    """
    return checked(ConversationSource, config, where=f"source {config.get('name', '')}".strip())


def _digest(record: Mapping[str, Any]) -> str:
    """Derive an id from a record's content, independently of other records and of the order of files."""
    try:
        text = json.dumps(record, sort_keys=True, default=str)
    except RecursionError as error:
        raise FormatError(f"the record is nested too deeply to derive an id from it ({error}): give it an id") from None
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
