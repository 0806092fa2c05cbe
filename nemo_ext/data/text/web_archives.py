"""Web archives as a source: the main text of WARC pages, extracted by trafilatura, and the texts of WET files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nemo_ext.data.text.documents import Document, Part, ReadReport, Source
from nemo_ext.data.text.user_files import find_files
from nemo_ext.job.settings import Share, Strings

_LARGEST = 1 << 22
"""Maximum page size in bytes, since trafilatura's time is quadratic in the number of links."""


@dataclass(frozen=True, kw_only=True)
class WarcSource(Source):
    """Pages in WARC files (`response` records of HTML or text) and texts in WET files (`conversion` records).

    A document has its record's id, with `url` and `date` in `about`. Other records are counted by type, and pages
    without main text as `no text`.

    path: Paths and globs of .warc, .wet, .warc.gz and .wet.gz files.
    precise: Whether trafilatura favours precision over recall, as for FineWeb.
    max_bad_share: Maximum share of malformed records; more are an error.
    """

    kind: ClassVar[str] = "warc"
    path: Strings
    precise: bool = True
    max_bad_share: Share = 0.01

    def inputs(self) -> list[tuple[str, Path]]:
        return [(path.name, path) for path in find_files(self.path, f"{self.kind} source")]

    def check(self) -> list[tuple[str, Path]]:
        _archives()
        return self.inputs()

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        iterator, error = _archives()
        try:
            with open(part.path, "rb") as file:
                record = None
                for record in iterator(file):
                    if (document := self._document(record, part, report)) is not None:
                        yield document
                if record is not None:  # warcio does not report a truncated file
                    while record.raw_stream.read(1 << 20):
                        pass
                    if record.raw_stream.limit:
                        raise EOFError(f"{record.raw_stream.limit:,} bytes of the last record are missing")
        except (error, EOFError, OSError) as problem:
            raise ValueError(f"{part.path} cannot be read to its end ({problem}): copy it again") from problem

    def _document(self, record: Any, part: Part, report: ReadReport) -> Document | None:
        report.records += 1
        headers = record.rec_headers
        name = str(headers.get_header("WARC-Record-ID") or f"{part.name}:{report.records}").strip("<>")
        if record.rec_type not in ("response", "conversion"):
            report.skip(f"{record.rec_type} record")
            return None
        kind = headers.get_header("Content-Type") or ""
        if record.rec_type == "response":
            kind = (record.http_headers and record.http_headers.get_header("Content-Type")) or ""
            if record.http_headers is not None and record.http_headers.get_statuscode() not in ("200", ""):
                report.skip(f"status {record.http_headers.get_statuscode()}")
                return None
            kind = kind.lower()
            if not kind.startswith(("text/html", "application/xhtml", "text/plain")):
                report.skip("not text")
                return None
        from trafilatura import extract

        stream = record.content_stream()
        data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            report.skip("too large", f"{part.path}: {name}")
            return None
        # warcio does not report damaged or truncated pages.
        if not getattr(getattr(stream, "decompressor", None), "eof", True):
            report.skip("damaged page", f"{part.path}: {name}")
            return None
        try:
            if "html" in kind:
                text = extract(data, favor_precision=self.precise, include_comments=False)
            else:
                text = _decoded(data, kind)
        except Exception as error:  # a single page must not stop the job
            report.skip("unreadable page", f"{part.path}: {name}: {error}")
            return None
        if not text:
            report.skip("no text", f"{part.path}: {name}")
            return None
        about = {"url": headers.get_header("WARC-Target-URI"), "date": headers.get_header("WARC-Date")}
        return Document(name, text, {key: value for key, value in about.items() if value})

    def finish(self, report: ReadReport) -> None:
        report.check_bad_share(f"{self.kind} source", self.max_bad_share)


def _decoded(data: bytes, kind: str) -> str:
    charset = kind.partition("charset=")[2].partition(";")[0].strip(" \"'")
    try:
        return data.decode(charset or "utf-8", errors="replace")
    except LookupError:
        return data.decode(errors="replace")


def _archives() -> tuple[Any, type[Exception]]:
    try:
        import trafilatura  # noqa: F401
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ImportError as error:
        raise ValueError(
            f"web archives require warcio and trafilatura: pip install 'nemo_ext[curate]' ({error})"
        ) from error
    return ArchiveIterator, ArchiveLoadFailed
