"""Reading of JSONL (plain, .gz, .zst) and Parquet files in parts, by one or more processes.

A part of a plain file is a range of lines, and a part of a Parquet file is a row group; a compressed file is a single
part. Results are in file order and do not depend on the number of processes.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from nemo_ext.data.text.documents import UNLIMITED, Part, ReadReport
from nemo_ext.data.text.user_files import (
    PACKED,
    JsonlSource,
    ParquetSource,
    json_object,
    open_lines,
    value_at,
    well_formed,
    whole_lines,
)
from nemo_ext.job.files import complete_file
from nemo_ext.job.progress import progress_of
from nemo_ext.job.records import json_line
from nemo_ext.job.workers import in_workers

PART_BYTES = 32 << 20
MALFORMED = "malformed"
new_hash = hashlib.blake2b(digest_size=8).copy  # the hash of `digest`; a copy takes less time than a new one


class Malformed(ValueError):
    """Raised for an invalid record: invalid JSON, or a missing or invalid value."""


def parts_of(files: Sequence[Path], *, part_bytes: int = PART_BYTES) -> list[Part]:
    """Split the files into parts, in order; raises ValueError if a Parquet file cannot be read."""
    parts = list[Part]()
    for path in files:
        source = (ParquetSource if path.suffix == ".parquet" else JsonlSource)(path=(str(path),))
        parts += source.parts(max_documents=UNLIMITED, max_size=part_bytes)
    return parts


def lines_of(part: Part) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, byte offset, line) of the non-blank lines of a part; for Parquet, rows as JSON, without offsets.

    Raises:
        ValueError: the file is damaged.
    """
    if part.path.endswith(".parquet"):
        source = ParquetSource(path=(part.path,))
        for number, row in source.numbered(part):
            yield number, 0, json_line(well_formed(row, source.place(part, number)))
        return
    with open_lines(part.path) as file:
        offset = part.start
        if offset:
            file.seek(offset)
        for number, line in enumerate(whole_lines(file, part.path), start=part.first):
            if part.stop and offset >= part.stop:
                return
            if not line.isspace():
                yield number, offset, line
            offset += len(line)


def plain_lines_of(part: Part) -> Iterator[bytes]:
    """Yield all lines of a part with a known number of lines, also blank ones; faster than `lines_of`."""
    with open_lines(part.path) as file:
        file.seek(part.start)
        yield from itertools.islice(whole_lines(file, part.path), part.documents)


def parse(line: bytes) -> dict[str, Any]:
    """Parse the JSON object on one line; raises Malformed."""
    record = json_object(line, strict=True)
    if isinstance(record, str):
        raise Malformed(record)
    return record


def required(record: Mapping[str, Any], key: str) -> Any:
    """Return the value in a record under a key or a path of nested keys; raises Malformed if it is missing."""
    if (value := value_at(record, key)) is None:
        raise Malformed(f"there is no value under key {key!r}; the record's keys are {', '.join(sorted(record)[:12])}")
    return value


def checked_id(value: Any, path: str) -> str:
    """Return an id as a string; raises Malformed, naming the key `path`, if it is not a string or a whole number."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise Malformed(f"{path!r}: expected a non-empty string or a whole number, not {value!r}")


def prompt_bytes(prompt: Any) -> bytes:
    """Serialise a prompt to canonical bytes, which do not depend on how its JSON was written."""
    if isinstance(prompt, str):
        return prompt.encode()
    try:
        return orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers of more than 64 bits
        return json.dumps(prompt, sort_keys=True).encode()


def digest(data: bytes) -> bytes:
    """Return an eight-byte hash of an id or a text (ten million of them contain a collision once in 400,000 runs)."""
    hashed = new_hash()
    hashed.update(data)
    return hashed.digest()


def note_malformed(report: ReadReport, part: Part, number: int, problem: str) -> None:
    """Count the malformed record on line `number`; for the first few, keep the place and `problem` as examples."""
    report.skip(MALFORMED, f"{part.path}:{number}: {problem}")


def check_share(report: ReadReport, what: str, most: float) -> None:
    """Raise ValueError if there are no records, or if more than a fraction `most` of them are malformed.

    `what` names the kind of records and opens the message.
    """
    if not report.records:
        raise ValueError(f"{what}: the files have no records; give at least one file with records")
    report.check_bad_share(what, most)


def read_parts[Result](
    parts: Sequence[Part], read: Callable[[Part], Result], *, workers: int, label: str
) -> Iterator[Result]:
    """Yield the result of `read` for each part, in order; `read` must be picklable. `label` names the progress bar."""
    total = sum(part.size for part in parts)
    with progress_of(label, total) as advance:
        few = len(parts) == 1 or total < PART_BYTES // 4
        for part, result in in_workers(read, parts, workers=1 if few else workers, ordered=True):
            assert result is not None
            yield result
            advance(part.size)


def unpacked(files: Sequence[Path], folder: Path) -> list[Path]:
    """Return the files as plain JSONL; compressed and Parquet files are unpacked into `folder`."""
    plain = []
    for number, path in enumerate(files):
        if path.suffix not in (*PACKED, ".parquet"):
            plain.append(path)
            continue
        copy = folder / f"{number:04d}.{path.name}.jsonl"
        with complete_file(copy) as file:
            for part in parts_of([path]):
                for _, _, line in lines_of(part):
                    file.write(line if line.endswith(b"\n") else line + b"\n")
        plain.append(copy)
    return plain
