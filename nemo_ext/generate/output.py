"""Output folder of a batch job: one part per range of rows, journals of unfinished ranges, and dead letters.

A part is named after its range and is linked into place atomically once complete, so no answer occurs twice. Until
then, each answer is a line in the journal of the worker that received it; workers on a range read all its journals.

    part-000012.parquet     answers of range 12
    dead/000012.jsonl       failed requests of range 12, with reasons
    .job/                   made_of.json, index.json, leases/, journals/000012.WORKER.jsonl
"""

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.data.text.user_files import pyarrow_module
from nemo_ext.endpoint.client import Answer, count
from nemo_ext.generate import columns
from nemo_ext.generate.rows import Range
from nemo_ext.generate.settings import Format
from nemo_ext.job.files import unfinished, write_text
from nemo_ext.job.leases import Leases
from nemo_ext.job.progress import notice
from nemo_ext.job.records import json_line, read_json
from nemo_ext.job.run_directory import OWN

DEAD = "dead"
_SUFFIX: dict[Format, str] = {"parquet": ".parquet", "jsonl": ".jsonl", "openai_batch": ".jsonl"}
_MEASURED = ("finish_reason", "prompt_tokens", "completion_tokens", "seconds")
Pair = tuple[int, int]
"""Position of a row in its range, and sample number."""


@dataclass
class OpenRange:
    """A range being processed.

    Attributes:
        range: the range.
        rows: its rows.
        keys: the rows' keys.
        pairs: row position and sample number of each answer to request, in order.
        again: number of parts that the range already has; above 0 when dead letters are retried.
        settled: pairs whose answer or failure is in the journals.
        asked: pairs that this worker has requested.
        read: number of bytes read so far from each journal.
    """

    range: Range
    rows: list[dict[str, Any]]
    keys: list[str]
    pairs: list[Pair]
    again: int = 0
    settled: set[Pair] = field(default_factory=set)
    asked: set[Pair] = field(default_factory=set)
    read: dict[Path, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every request of the range has an answer or has failed."""
        return self.settled.issuperset(self.pairs)


@dataclass
class Output:
    """One worker's access to the output folder.

    Attributes:
        folder: the folder.
        format: file format of the parts.
        schema: Arrow schema of the input columns; None if no Parquet is written.
        names: mapping from input columns to their names in the output.
        leases: leases on the ranges.
        retry_dead: whether to retry requests that failed in earlier starts.
    """

    folder: Path
    format: Format
    schema: Any
    names: Mapping[str, str]
    leases: Leases
    retry_dead: bool = False

    def __post_init__(self) -> None:
        self.worker = uuid.uuid4().hex[:12]
        self._journals: dict[str, Any] = {}
        for name in (DEAD, f"{OWN}/leases", f"{OWN}/journals"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def part(self, range_: Range, again: int = 0) -> Path:
        """Return the path for a range's answers, or for those from the `again`-th retry of its dead letters."""
        return self.folder / f"part-{range_.name}{f'-{again}' if again else ''}{_SUFFIX[self.format]}"

    def parts(self, range_: Range) -> list[Path]:
        """Return the existing files with a range's answers, in order."""
        files = (self.part(range_, again) for again in itertools.count())
        return list(itertools.takewhile(Path.exists, files))

    def dead(self, range_: Range) -> Path:
        """Return the path for a range's dead letters."""
        return self.folder / DEAD / f"{range_.name}.jsonl"

    def settled(self) -> set[str]:
        """Return the names of all existing parts, which are the files with answers."""
        return {name for name in os.listdir(self.folder) if name.startswith("part-")}

    def answered(self, range_: Range) -> set[tuple[str, int]]:
        """Return the (key, sample number) pairs of a range's answers.

        Raises:
            ValueError: a part cannot be read.
        """
        return {pair for part in self.parts(range_) for pair in self._pairs(part)}

    def failures(self, range_: Range) -> list[dict[str, Any]]:
        """Return a range's dead letters without those that a later attempt has answered."""
        if not self.dead(range_).exists():
            return []
        lines, answered = self._dead_lines(range_), self.answered(range_)
        return [line for line in lines if (line["key"], line["sample"]) not in answered]

    def _dead_lines(self, range_: Range) -> list[dict[str, Any]]:
        return [read_json(line) for line in self.dead(range_).read_bytes().split(b"\n") if line]

    def failed(self, ranges: Sequence[Range]) -> int:
        """Return the number of failed requests in these ranges, including those in journals; 0 if they are retried."""
        if self.retry_dead:
            return 0
        parts, failed = self.settled(), 0
        for range_ in ranges:
            if self.part(range_).name in parts:
                failed += len(self.failures(range_))
            else:
                failed += sum(bool(line["problem"]) for line in self._entries(self._journals_of(range_)).values())
        return failed

    def kept(self, range_: Range, keys: Sequence[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield key, sample number and columns of each answer in a range, from its parts, or else from its journals.

        Raises:
            ValueError: a part cannot be read.
        """
        parts = self.parts(range_)
        for part in parts:
            for answer in self._columns(part, None).to_pylist():
                yield answer["key"], answer["sample"], answer
        if not parts:
            for (row, sample), line in self._entries(self._journals_of(range_)).items():
                if not line["problem"]:
                    yield keys[row], sample, line

    def open(self, range_: Range, rows: list[dict[str, Any]], keys: list[str], samples: int) -> OpenRange:
        """Open a range, to request all its answers or, if it is finished, to retry its failures."""
        repeated = set(range_.repeated)
        pairs = [(row, sample) for row in range(len(rows)) if row not in repeated for sample in range(samples)]
        again = len(self.parts(range_))
        if again:
            failed = {(line["key"], line["sample"]) for line in self.failures(range_)}
            pairs = [(row, sample) for row, sample in pairs if (keys[row], sample) in failed]
        opened = OpenRange(range_, rows, keys, pairs, again)
        self.refresh(opened)
        return opened

    def refresh(self, opened: OpenRange) -> None:
        """Mark as settled the requests of a range that are answered, or have failed, in other workers' journals.

        Failures are ignored if they are to be retried.
        """
        for file in self._journals_of(opened.range):
            if self.worker not in file.name:
                for line in self._lines(file, opened):
                    if not (line["problem"] and self.retry_dead):
                        opened.settled.add((line["row"], line["sample"]))

    def _journals_of(self, range_: Range) -> list[Path]:
        return sorted(self.folder.glob(f"{OWN}/journals/{range_.name}.*.jsonl"))

    def _lines(self, file: Path, opened: OpenRange | None = None) -> Iterator[dict[str, Any]]:
        """Yield the complete lines of a journal; with `opened`, only those added since this worker last read it."""
        start = opened.read.get(file, 0) if opened is not None else 0
        with contextlib.suppress(FileNotFoundError), open(file, "rb") as journal:  # removed when its range is finished
            journal.seek(start)
            for line in journal:
                if not line.endswith(b"\n"):
                    break
                start += len(line)
                try:
                    yield read_json(line)
                except ValueError:  # such as after a power failure
                    notice(f"{file}: a line cannot be read; its answer is requested again")
        if opened is not None:
            opened.read[file] = start

    def add(self, opened: OpenRange, pair: Pair, answer: Answer) -> None:
        """Append an answer or failure to this worker's journal of a range.

        Args:
            pair: row position in the range, and sample number.

        Raises:
            OSError: the journal cannot be written.
        """
        name = opened.range.name
        if name not in self._journals:
            self._journals[name] = open(self.folder / OWN / "journals" / f"{name}.{self.worker}.jsonl", "ab")  # noqa: SIM115
        line: dict[str, Any] = {"row": pair[0], "sample": pair[1]}
        line |= {name: getattr(answer, name) for name in (*columns.ANSWER[2:], "problem", "status")}
        line["tool_calls"] = line["tool_calls"] or None
        if self.format == "openai_batch":
            line["body"] = answer.body
        self._journals[name].write(json_line(line))
        self._journals[name].flush()
        opened.settled.add(pair)

    def commit(self, opened: OpenRange) -> bool:
        """Write the part and the dead letters of a complete range; only the holder of its lease may call this.

        Return False, writing nothing, if answers have disappeared from the journals; they are then requested again.

        Raises:
            OSError: a file cannot be written.
        """
        journals = self._journals_of(opened.range)
        entries = self._entries(journals)
        missing = set(opened.pairs) - set(entries)
        if missing and not self.part(opened.range, opened.again).exists():
            opened.settled -= missing
            opened.asked -= missing
            return False
        for pair in missing:  # another worker held the lease too, finished first and removed the journals
            entries[pair] = {"problem": "", "status": None} | dict.fromkeys(columns.ANSWER[2:])
        failed = [self._failure(opened, pair, entries[pair]) for pair in opened.pairs if entries[pair]["problem"]]
        if not opened.again and not missing:  # before the part, which marks the range as finished
            self._write_dead(opened.range, failed)
        answers = [(pair, entries[pair]) for pair in opened.pairs if not entries[pair]["problem"]]
        if not missing and ((opened.again and not answers) or self._write(opened, answers)):
            if opened.again:
                self._write_dead(opened.range, failed)
        else:  # another worker held the lease too and finished first
            known = self._dead_lines(opened.range) if self.dead(opened.range).exists() else []
            written = self.answered(opened.range) | {(line["key"], line["sample"]) for line in known}
            lost = [self._failure(opened, pair, entries[pair]) for pair in opened.pairs]
            lost = [line for line in lost if (line["key"], line["sample"]) not in written]
            self._write_dead(opened.range, [*known, *lost])
        self.close(opened)
        for file in journals:
            file.unlink(missing_ok=True)
        return True

    def give_up(self, opened: OpenRange) -> None:
        """Write the dead letters of an incomplete range when too many requests failed, if it has no part yet."""
        if not opened.again:
            entries = self._entries(self._journals_of(opened.range))
            failed = [self._failure(opened, pair, line) for pair, line in entries.items() if line["problem"]]
            self._write_dead(opened.range, failed)

    def _entries(self, journals: Iterable[Path]) -> dict[Pair, dict[str, Any]]:
        """Return the journals' entries keyed by row and sample; an answer takes precedence over a failure."""
        entries: dict[Pair, dict[str, Any]] = {}
        for line in (line for file in journals for line in self._lines(file)):
            pair = line["row"], line["sample"]
            if pair not in entries or (entries[pair]["problem"] and not line["problem"]):
                entries[pair] = line
        return entries

    def clear(self) -> None:
        """Remove journals and temporary files left by killed workers, once all ranges are finished."""
        for file in (*self.folder.glob(f"{OWN}/journals/*"), *self.folder.glob(".part-*")):
            file.unlink(missing_ok=True)

    def close(self, opened: OpenRange) -> None:
        """Close a range's journal and release its lease."""
        if (journal := self._journals.pop(opened.range.name, None)) is not None:
            journal.close()
        self.leases.drop(opened.range.name)

    def _write_dead(self, range_: Range, lines: Sequence[Mapping[str, Any]]) -> None:
        if lines or self.dead(range_).exists():
            write_text(self.dead(range_), b"".join(map(json_line, lines)).decode())

    def _failure(self, opened: OpenRange, pair: Pair, line: Mapping[str, Any]) -> dict[str, Any]:
        reason = line["problem"] or (
            "its answer arrived after the part was written: set generate.retry_dead=true to request it again"
        )
        return {
            "key": opened.keys[pair[0]],
            "sample": pair[1],
            "problem": reason,
            "status": line["status"],
            "row": opened.rows[pair[0]],
        }

    def _write(self, opened: OpenRange, answers: Sequence[tuple[Pair, Mapping[str, Any]]]) -> bool:
        """Write a range's part from `answers`, as ((row, sample), journal line); return False if the part exists."""
        part = self.part(opened.range, opened.again)
        records = [
            {"key": opened.keys[row], "sample": sample} | {name: line[name] for name in columns.ANSWER[2:]}
            for (row, sample), line in answers
        ]
        temporary = unfinished(part)
        with open(temporary, "wb") as file:
            if self.format == "parquet":
                self._write_parquet(file, opened, answers, records)
            for ((row, _), line), record in zip(answers, records, strict=True):
                if self.format == "jsonl":
                    inputs = {self.names[name]: value for name, value in opened.rows[row].items() if name in self.names}
                    file.write(json_line(inputs | record))
                elif self.format == "openai_batch":
                    file.write(json_line(_batch_line(record, line["body"])))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, part)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def _write_parquet(
        self,
        file: Any,
        opened: OpenRange,
        answers: Sequence[tuple[Pair, Mapping[str, Any]]],
        records: Sequence[Mapping[str, Any]],
    ) -> None:
        pyarrow = pyarrow_module()
        inputs = columns.table([opened.rows[row] for (row, _), _ in answers], self.schema)
        inputs = inputs.select(list(self.names)).rename_columns(list(self.names.values()))
        answered = columns.table(records, pyarrow.schema(columns.answer_fields()))
        arrays = [*inputs.columns, *answered.columns]
        schema = pyarrow.schema([*inputs.schema, *answered.schema])
        pyarrow.parquet.write_table(
            pyarrow.table(arrays, schema=schema), file, compression="zstd", write_page_checksum=True
        )

    def _pairs(self, part: Path) -> list[tuple[str, int]]:
        if self.format == "parquet":
            table = self._columns(part, ("key", "sample"))
            return list(zip(table["key"].to_pylist(), table["sample"].to_pylist(), strict=True))
        try:
            lines = [read_json(line) for line in part.read_bytes().splitlines()]
            return [(line["custom_id" if self.format == "openai_batch" else "key"], line["sample"]) for line in lines]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{part} cannot be read ({error}): the same command requests its rows again") from None

    def measured(self, part: Path) -> dict[str, list[Any]]:
        """Return the columns of a part that the report needs.

        Raises:
            ValueError: the part cannot be read.
        """
        if self.format == "parquet":
            table = self._columns(part, _MEASURED)
            return {name: table[name].to_pylist() for name in _MEASURED}
        lines = [read_json(line) for line in part.read_bytes().splitlines()]
        if self.format == "openai_batch":
            lines = [_measures(line["response"]["body"]) for line in lines]
        return {name: [line[name] for line in lines] for name in _MEASURED}

    def _columns(self, part: Path, names: Sequence[str] | None) -> Any:
        pyarrow = pyarrow_module()
        try:
            return pyarrow.parquet.read_table(
                part, columns=None if names is None else list(names), page_checksum_verification=True, partitioning=None
            )
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{part} cannot be read ({error}): the same command requests its rows again") from None

    def set_aside_damaged(self, ranges: Sequence[Range]) -> int:
        """Move unreadable parts to `.job/damaged`, so that their ranges are redone; return the number of ranges."""
        damaged, parts = 0, self.settled()
        for range_ in ranges:
            try:
                self.answered(range_)
                later = [name for name in parts if name.startswith(f"part-{range_.name}-")]
                if later and self.part(range_).name not in parts:
                    first = self.part(range_).name
                    raise ValueError(f"{self.folder / later[0]} exists without {first}: its rows are requested again")
            except ValueError as error:
                damaged += 1
                aside = self.folder / OWN / "damaged"
                aside.mkdir(exist_ok=True)
                # The first part last, because it marks the range as finished.
                for part in sorted(self.folder.glob(f"part-{range_.name}[-.]*"), key=lambda part: -len(part.name)):
                    part.replace(aside / f"{part.name}.{uuid.uuid4().hex[:8]}")
                notice(f"{error}; moved to {aside}")
        return damaged


def _measures(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's columns for the report from the body of its response; None if unknown, as for `seconds`."""
    usage, ended = body.get("usage") or {}, body["choices"][0].get("finish_reason")
    return {
        "finish_reason": ended if isinstance(ended, str) else None,
        **{name: count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")},
        "seconds": None,
    }


def _batch_line(answer: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Format an answer and the body of its response as a line of an OpenAI batch output file."""
    return {
        "id": f"batch_req_{answer['key']}_{answer['sample']}",
        "custom_id": answer["key"],
        "sample": answer["sample"],
        "response": {"status_code": 200, "request_id": str(body.get("id", "")), "body": body},
        "error": None,
    }
