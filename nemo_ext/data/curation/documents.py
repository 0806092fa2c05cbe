"""Documents of curation: datatrove's, out of any source, and in compressed JSONL files between passes and after."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard
from datatrove.data import Document

from nemo_ext.data.text.documents import Part, ReadReport, Source
from nemo_ext.data.text.user_files import RecordSource
from nemo_ext.job.files import complete_file

SUFFIX = ".jsonl.zst"
_LEVEL = 3
_OURS = ("id", "text")


def documents(source: Source, parts: Sequence[Part], stream: str, report: ReadReport) -> Iterator[Document]:
    """Documents of some parts of a source, with what else their records hold as metadata, and `source`.

    Empty and unencodable ones are only counted. A record's own `id` is kept; its `text` is kept as `text_` if another
    key holds the text.
    """
    for part in parts:
        for document in _read(source, part, stream, report):
            try:
                document.text.encode()
            except UnicodeEncodeError as error:
                report.skip("malformed", f"{document.id}: {error.reason} at character {error.start}")
                continue
            if document.text.isspace() or not document.text:
                report.skip("empty", document.id)
                continue
            yield document


def _read(source: Source, part: Part, stream: str, report: ReadReport) -> Iterator[Document]:
    if not isinstance(source, RecordSource):
        for plain in source.read(part, report):
            yield Document(text=plain.text, id=plain.id, metadata={"source": stream, **plain.about})
        return
    for number, record in source.records(part, report):
        text = source.text_of(record, part, number, report)
        if text is None:
            continue
        about = {key: value for key, value in record.items() if key != source.text_key}
        own = about.pop("id", None)
        if "text" in about:
            about["text_"] = about.pop("text")
        name = f"{stream}/{part.name}:{number}" if own is None else str(own)
        yield Document(text=text, id=name, metadata={"source": stream, **about})


def line_of(document: Document, **more: Any) -> bytes:
    """A document as a line of JSON."""
    record = {"id": document.id, "text": document.text, **document.metadata, **more}
    try:
        return orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # numbers beyond 64 bits, half characters
        return json.dumps(record, default=str).encode() + b"\n"


def read_lines(path: Path) -> Iterator[Document]:
    """Documents of a file that `Writer` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            for line in io.BufferedReader(stream, buffer_size=1 << 20):
                record = json.loads(line)
                about = {key: value for key, value in record.items() if key not in _OURS}
                yield Document(text=record["text"], id=record["id"], metadata=about)
    except (OSError, ValueError, KeyError, zstandard.ZstdError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove its folder and run again") from error


class Writer:
    """Compressed files of documents, which get their names together at the end; the same documents, the same bytes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, IO[bytes]] = {}

    def write(self, path: Path, line: bytes) -> None:
        """Write a line of JSON to one of the files."""
        if (file := self._open.get(path)) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = self._stack.enter_context(complete_file(path))
            compressed = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(raw, closefd=False)
            file = self._open[path] = self._stack.enter_context(compressed)
        file.write(line)


@contextmanager
def writer() -> Iterator[Writer]:
    """A writer, whose files are complete when it ends without an error."""
    with ExitStack() as stack:
        yield Writer(stack)
