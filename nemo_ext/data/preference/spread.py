"""Grouping of the records of one prompt, from any number of files and in any order.

Records are written to parts by a digest of their id (a Grace hash join), and each part is sorted by it when it is
read; one that is too large is divided again first. So no file is ever in memory whole, two files of any size are
joined by id, answers to one prompt may lie anywhere, and the result does not depend on the order of files, records or
parts.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from nemo_ext.chat.formats import FormatError
from nemo_ext.data.preference.group import Side
from nemo_ext.data.preference.records import RecordKeys, group_key
from nemo_ext.data.preference.settings import SourceSettings
from nemo_ext.data.text.documents import UNLIMITED, Part, ReadReport
from nemo_ext.data.text.user_files import PACKED, RecordSource, record_source

PART_BYTES = 64 << 20
MOST_PARTS = 128  # all open at once
_UNPACKED = 5  # compressed files and Parquet are about this many times larger as JSON


class Placed(NamedTuple):
    """A record with its place, for messages, and the side of its file."""

    record: dict[str, Any]
    where: str
    side: Side


def readers(source: SourceSettings) -> dict[str, RecordSource]:
    """Reader of the files of each side.

    Raises:
        ValueError: a file is missing, or the names mix .parquet and others.
    """
    found: dict[str, RecordSource] = {}
    for side, paths in source.files.items():
        found[side] = record_source(paths, source.file_kind, f"sources.{source.name}")
        try:
            found[side].check_files()
        except ValueError as error:
            raise ValueError(f"sources.{source.name}: {error}") from None
    return found


def spread(
    source: SourceSettings,
    files: dict[str, RecordSource],
    folder: Path,
    report: ReadReport,
    max_bad_share: float,
    advance: Callable[[int], None],
) -> list[Path]:
    """Write the records of a source to parts in `folder`; those without id and prompt are skipped and counted.

    Raises:
        ValueError: a file cannot be read, or too large a share of a side's records does not fit.
    """
    size = 0
    for reader in files.values():
        for _, path in reader.inputs():
            packed = reader.kind == "parquet" or path.suffix in PACKED
            size += path.stat().st_size * (_UNPACKED if packed else 1)
    count = min(MOST_PARTS, max(1, -(-size // PART_BYTES)))
    paths = [folder / f"records-{number:04d}" for number in range(count)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(open(path, "w", encoding="ascii")) for path in paths]
        for side, reader in files.items():
            read = ReadReport()
            for part in reader.parts(max_documents=UNLIMITED, max_size=UNLIMITED):
                for key, record, place in _records(reader, part, read, source.keys):
                    outputs[int(key[:16], 16) * count >> 64].write(f"{key}\t{json.dumps([record, place, side])}\n")
                advance(part.size)
            read.check_bad_share(f"sources.{source.name}", max_bad_share)
            report.add(read)
    return paths


def gathered(path: Path) -> Iterator[list[Placed]]:
    """Yield the records of each id in a part, ids in the order of their digests and their records in a fixed order."""
    if path.stat().st_size > 2 * PART_BYTES and (pieces := _divided(path)):
        for piece in pieces:
            yield from gathered(piece)
            piece.unlink()
        return
    with open(path, encoding="ascii") as file:
        lines = sorted(file)
    for _, same in groupby(lines, key=lambda line: line.partition("\t")[0]):
        yield [Placed(*json.loads(line.partition("\t")[2])) for line in same]


def _divided(path: Path) -> list[Path]:
    """Divide a part into smaller ones, in the order of the digests; an empty list if it is all one id."""
    with open(path, encoding="ascii") as file:
        keys = [int(line[:16], 16) for line in file]
    low, high = min(keys), max(keys)
    if low == high:
        return []
    count = min(MOST_PARTS, -(-path.stat().st_size // PART_BYTES))
    pieces = [path.with_name(f"{path.name}.{number:04d}") for number in range(count)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(open(piece, "w", encoding="ascii")) for piece in pieces]
        with open(path, encoding="ascii") as file:
            for key, line in zip(keys, file, strict=True):
                outputs[(key - low) * count // (high - low + 1)].write(line)
    return pieces


def _records(
    reader: RecordSource, part: Part, report: ReadReport, keys: RecordKeys
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Digest of the group's key, record and place of each record that JSON can hold."""
    for number, record in reader.records(part, report):
        place = reader.place(part, number)
        try:
            key = hashlib.blake2b(group_key(record, keys).encode(errors="surrogatepass"), digest_size=12).hexdigest()
            json.dumps(record)
        except (FormatError, TypeError) as error:
            report.skip("schema", f"{place}: {error}")
            continue
        yield key, record, place
