"""Grouping of records by prompt, over any number of files and in any order, as a Grace hash join.

Records are written to parts by a digest of their id. Each part is sorted by the digest when it is read, after being
divided again if it is too large. So memory does not depend on the size of the files, the answers to a prompt may be in
any files, and the result does not depend on the order of files, records or parts.
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
from nemo_ext.job.settings import prefixed_errors

PART_BYTES = 64 << 20
MOST_PARTS = 128  # all are open at the same time
_UNPACKED = 5  # approximate ratio of the size as JSON to that of compressed or Parquet files


class Placed(NamedTuple):
    """A record, its place in the input (for messages), and the side (strong, weak or "") of its file."""

    record: dict[str, Any]
    where: str
    side: Side


def readers(source: SourceSettings) -> dict[str, RecordSource]:
    """Return a reader of the files of each side in delta learning (strong, weak or ""), keyed by side.

    Raises:
        ValueError: a file is missing, or .parquet files are mixed with others.
    """
    by_side: dict[str, RecordSource] = {}
    where = f"sources.{source.name}"
    for side, paths in source.files.items():
        by_side[side] = record_source(paths, source.file_kind, where)
        with prefixed_errors(where):
            by_side[side].check_files()
    return by_side


def spread(
    source: SourceSettings,
    files: dict[str, RecordSource],
    folder: Path,
    report: ReadReport,
    max_bad_share: float,
    advance: Callable[[int], None],
) -> list[Path]:
    """Write the records of a source to parts in `folder`; return the paths of the parts.

    Invalid records, and those with neither id nor prompt, are skipped.

    Args:
        files: readers, keyed by side.
        advance: called with the number of input bytes read.

    Raises:
        ValueError: a file cannot be read, or too large a share of a side's records is invalid.
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
    """Yield the records of each id in a part's file, by the order of the ids' digests; records of one id are sorted."""
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
    """Divide a part's file into smaller ones, in the order of the digests; return [] if it has only one id."""
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
    """Yield (digest of its group's key, record, place in the input) for each valid record; count others in `report`."""
    for number, record in reader.records(part, report):
        place = reader.place(part, number)
        try:
            key = hashlib.blake2b(group_key(record, keys).encode(errors="surrogatepass"), digest_size=12).hexdigest()
            json.dumps(record)
        except (FormatError, TypeError) as error:
            report.skip("schema", f"{place}: {error}")
            continue
        yield key, record, place
