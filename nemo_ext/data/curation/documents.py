"""Curated documents as datatrove's `Document`: reading sources, and reading and writing compressed JSONL files."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import zstandard
from datatrove.data import Document

from nemo_ext.data.text.documents import Part, ReadReport, Source, encodable
from nemo_ext.data.text.user_files import DAMAGED, RecordSource, open_lines
from nemo_ext.job.files import complete_file
from nemo_ext.job.records import json_line, read_json

SUFFIX = ".jsonl.zst"
_LEVEL = 3
_OURS = ("id", "text")


def documents(source: Source, parts: Sequence[Part], stream: str, report: ReadReport) -> Iterator[Document]:
    """Yield documents from parts of a source, with the record's other keys and the stream (`source`) as metadata.

    Blank and unencodable documents are only counted. A record keeps its own `id`; its own `source` is kept as
    `source_` and, if `text_key` is a different key, its own `text` as `text_`. Numbers that JSON cannot represent (NaN)
    become null.
    """
    for part in parts:
        for document, _ in encodable(_read(source, part, stream, report), report):
            yield document


def _read(source: Source, part: Part, stream: str, report: ReadReport) -> Iterator[Document]:
    if not isinstance(source, RecordSource):
        for plain in source.read(part, report):
            about = dict(plain.about)
            _make_room(about, "source")
            yield Document(text=plain.text, id=plain.id, metadata={"source": stream, **about})
        return
    for number, record in source.records(part, report):
        text = source.text_of(record, part, number, report)
        if text is None:
            continue
        about = {key: value for key, value in record.items() if key != source.text_key}
        record_id = about.pop("id", None)
        for key in ("text", "source"):
            _make_room(about, key)
        document_id = f"{stream}/{part.name}:{number}" if record_id is None else str(record_id)
        yield Document(text=text, id=document_id, metadata={"source": stream, **about})


def _make_room(about: dict[str, Any], key: str) -> None:
    """Free `key` in a record's metadata for our use: its value moves to `key_`, or to `key__` if that is taken, etc."""
    if key in about:
        other = f"{key}_"
        while other in about:
            other += "_"
        about[other] = about.pop(key)


def line_of(document: Document, **more: Any) -> bytes:
    """Encode a document as a JSON line with additional keys; the record's own keys of the same names are renamed."""
    about = dict(document.metadata)
    for key in more:
        _make_room(about, key)
    return json_line({"id": document.id, "text": document.text, **about, **more})


def read_lines(path: Path) -> Iterator[Document]:
    """Yield the documents in a file written by `Writer`; raises ValueError if the file is damaged."""
    try:
        with open_lines(str(path)) as file:
            for line in file:
                record = read_json(line, strict=False)
                about = {key: value for key, value in record.items() if key not in _OURS}
                yield Document(text=record["text"], id=record["id"], metadata=about)
    except (*DAMAGED, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove its folder and run again") from error


class Writer:
    """Writer of compressed JSONL files, which get their final names when the exit stack closes without an error.

    Equal documents produce equal bytes.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, IO[bytes]] = {}

    def write(self, path: Path, line: bytes) -> None:
        """Append a JSON line to a file, which is opened if necessary."""
        if (file := self._open.get(path)) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = self._stack.enter_context(complete_file(path))
            compressed = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(raw, closefd=False)
            file = self._open[path] = self._stack.enter_context(compressed)
        file.write(line)
