"""Where the text of a stream comes from.

Every kind of source is a frozen dataclass that lists its input in a fixed order (`parts`, cheap) and reads
one part at a time (`read`), so any worker can read any part and the documents do not depend on who read them.
What applies to the stream as a whole, removing duplicates and stopping at `max_bytes`, is `Admission`: it
sees the documents in order. What does not become a document is counted with a reason in a `ReadReport`.

User data: `jsonl`, `parquet`, `text` (one document a file), `tree` (a directory of source files). Offline
corpora that any installation has: `python_stdlib` (code), `docstrings` and `package_docs` (prose of the
installed packages).
"""

import ast
import dataclasses
import difflib
import email
import fnmatch
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import re
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, ClassVar, cast

logger = logging.getLogger(__name__)

EXAMPLES_PER_REASON = 5
_HEADERS = (".h", ".hpp", ".cuh")
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One text and a name for it that is unique in its source and does not hold the machine's paths."""

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a source that is read on its own: a file, some lines of it, or a Parquet row group.

    `size` is in bytes of input; `documents` is how many documents it should give (0: not known). `start` and
    `stop` are byte offsets in a JSONL file (stop 0: to the end), `start` is the row group in a Parquet file,
    and `first` is the number of the first line or row.
    """

    name: str
    path: str
    size: int
    documents: int = 1
    start: int = 0
    stop: int = 0
    first: int = 1


@dataclass
class ReadReport:
    """What a reader met: records seen, and those skipped by reason with the first few places of each."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, where: str, *, count: int = 1) -> None:
        """Count a record that gave no document; `where` is kept for the first few of each reason."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        places = self.examples.setdefault(reason, [])
        if where and len(places) < EXAMPLES_PER_REASON:
            places.append(where)

    def add(self, other: "ReadReport") -> None:
        """Add the counts of a later part of the same source."""
        self.records += other.records
        for reason, count in other.skipped.items():
            self.skip(reason, "", count=count)
            room = EXAMPLES_PER_REASON - len(self.examples[reason])
            self.examples[reason].extend(other.examples.get(reason, [])[:room])

    def summary(self) -> str:
        """One line: `3 malformed (a.jsonl:7: ...), 12 duplicate`, or "nothing skipped"."""
        said = []
        for reason, count in sorted(self.skipped.items()):
            places = "; ".join(self.examples.get(reason, []))
            said.append(f"{count} {reason}" + (f" ({places})" if places else ""))
        return ", ".join(said) or "nothing skipped"


class Admission:
    """Decides in stream order which documents are kept: no byte-identical duplicates, at most `max_bytes`.

    Duplicates are recognised by a 16-byte digest: about 100 bytes of memory a document while reading.
    """

    def __init__(self, source: "Source") -> None:
        self._max_bytes = source.max_bytes
        self._seen: set[bytes] | None = set() if source.deduplicate else None
        self.size = 0
        self.full = False

    def admit(self, digest: bytes, size: int, report: ReadReport) -> bool:
        """Say whether the next document of `size` bytes is kept; `full` tells that `max_bytes` is reached."""
        if self.full:
            return False
        if self._seen is not None and digest in self._seen:
            report.skip("duplicate", "")
            return False
        if self._max_bytes is not None and self.size + size > self._max_bytes:
            self.full = True
            return False
        if self._seen is not None:
            self._seen.add(digest)
        self.size += size
        return True


def document_digest(text: bytes) -> bytes:
    """Digest (16 bytes) by which byte-identical documents are recognised."""
    return hashlib.blake2b(text, digest_size=16).digest()


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of an error message on an unknown word: the nearest known one, and all of them."""
    known = sorted(words)
    close = difflib.get_close_matches(word, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known)}"


# ---------------------------------------------------------------------------------- the base


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options that every kind has.

    max_bytes: Keep documents, in order, while their UTF-8 text is at most this long in total (None: all).
    deduplicate: Drop byte-identical documents after the first.
    """

    kind: ClassVar[str] = ""
    max_bytes: int | None = None
    deduplicate: bool = True

    @staticmethod
    def from_config(config: Mapping[str, object]) -> "Source":
        """Build the source that `config["kind"]` names from the other keys.

        Raises:
            ValueError: Unknown kind or key (with the nearest known), missing key, value of the wrong type.
        """
        kind = config.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"unknown source kind {kind!r}: {nearest(str(kind), KINDS)}")
        source_class = KINDS[kind]
        known = {item.name: item for item in dataclasses.fields(source_class)}
        values: dict[str, object] = {}
        for key, value in config.items():
            if key == "kind":
                continue
            if key not in known:
                raise ValueError(f"unknown key {key!r} in a {kind!r} source: {nearest(key, known)}")
            values[key] = _checked_value(key, value, f"{kind} source")
        for name, item in known.items():
            if item.default is dataclasses.MISSING and name not in values:
                raise ValueError(f"a {kind!r} source needs the key {name!r}")
        return cast(Callable[..., Source], source_class)(**values)

    def describe(self) -> dict[str, object]:
        """The mapping that `from_config` turns back into this source."""
        return {"kind": self.kind} | dataclasses.asdict(self)

    def inputs(self) -> list[tuple[str, Path]]:
        """The (name, path) of every input file, sorted by name.

        Raises:
            ValueError: If there is none; FileNotFoundError if a named one does not exist.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Digest of the input files' names, sizes and modification times, to notice that the data changed."""
        rows = []
        for name, path in self.inputs():
            status = path.stat()
            rows.append([name, status.st_size, status.st_mtime_ns if self._times_matter else 0])
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Find out cheaply whether the source can be read.

        Raises:
            ValueError: Or FileNotFoundError, naming the file and what is wrong with it.
        """
        self.inputs()

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        """The source in pieces of at most so many documents and input bytes, where its format can be cut."""
        for name, path in self.inputs():
            yield Part(name=name, path=str(path), size=path.stat().st_size)

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        """Read the documents of one part in order and count in `report` what is skipped."""
        raise NotImplementedError

    def finish(self, report: ReadReport) -> None:
        """Judge a fully read source: ValueError when too much of it was bad."""

    # Installed files get new times with every installation; the same version has the same content.
    _times_matter: ClassVar[bool] = True


def iter_documents(source: Source, *, report: ReadReport | None = None) -> Iterator[Document]:
    """Read a whole source in order, without duplicates and up to `max_bytes`.

    Args:
        report: Filled with what was skipped; without one, skips are logged as a warning at the end.

    Raises:
        ValueError: The source is malformed beyond what its options allow.
    """
    counted = ReadReport() if report is None else report
    admission = Admission(source)
    for part in source.parts(max_documents=1 << 62, max_size=1 << 62):
        for document, data in readable(source, part, counted):
            if admission.admit(document_digest(data), len(data), counted):
                yield document
            if admission.full:
                break
        if admission.full:
            break
    source.finish(counted)
    if report is None and counted.skipped:
        logger.warning("%s source: %s", source.kind, counted.summary())


def readable(source: Source, part: Part, report: ReadReport) -> Iterator[tuple[Document, bytes]]:
    """The documents of a part with their UTF-8 bytes; blank and unencodable ones are only counted."""
    for document in source.read(part, report):
        try:
            data = document.text.encode()
        except UnicodeEncodeError as error:
            report.skip("malformed", f"{document.id}: {error.reason} at character {error.start}")
            continue
        if document.text.isspace() or not data:
            report.skip("empty", document.id)
            continue
        yield document, data


# --------------------------------------------------------------------------------- user data


@dataclass(frozen=True, kw_only=True)
class RecordSource(Source):
    """Files with many records each. More than `max_bad_share` of malformed ones is an error."""

    paths: tuple[str, ...]
    max_bad_share: float = 0.01

    def inputs(self) -> list[tuple[str, Path]]:
        return _named_files(self.paths, self.kind)

    def finish(self, report: ReadReport) -> None:
        bad = report.skipped.get("malformed", 0)
        if bad > self.max_bad_share * report.records:
            raise ValueError(
                f"{bad} of {report.records} records of the {self.kind} source are malformed, more than "
                f"max_bad_share={self.max_bad_share}: {'; '.join(report.examples['malformed'])}. "
                "Mend the files or raise max_bad_share"
            )


@dataclass(frozen=True, kw_only=True)
class JsonlSource(RecordSource):
    """One JSON object a line, plain, .gz or .zst (.zst needs pyarrow); blank lines are ignored.

    Plain files are read by several workers at once, a compressed file by one.
    """

    kind: ClassVar[str] = "jsonl"
    text_key: str = "text"

    def check(self) -> None:
        for name, path in self.inputs():
            report = ReadReport()
            sample = Part(name=name, path=str(path), size=0, stop=_SAMPLE_BYTES)
            if next(self.read(sample, report), None) is None and report.records:
                raise ValueError(f"{path}: no line has a text: {'; '.join(report.examples['malformed'])}")

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        for name, path in self.inputs():
            if path.suffix in (".gz", ".zst"):
                yield Part(name=name, path=str(path), size=path.stat().st_size, documents=0)
                continue
            start = stop = lines = 0
            first = 1
            with open(path, "rb") as file:
                for line in itertools.chain(file, [b""]):  # the empty line ends the last part
                    enough = not line or lines >= max_documents or stop + len(line) - start > max_size
                    if lines and enough:
                        place = {"size": stop - start, "start": start, "stop": stop, "first": first}
                        yield Part(name=name, path=str(path), documents=lines, **place)
                        start, first, lines = stop, first + lines, 0
                    stop += len(line)
                    lines += 1

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        position = part.start
        with _open_lines(part.path) as file:
            if part.start:
                file.seek(part.start)
            for number, line in enumerate(_whole_lines(file, part.path), start=part.first):
                position += len(line)
                if not line.isspace():
                    report.records += 1
                    text, problem = self._text_of(line)
                    if text is None:
                        report.skip("malformed", f"{part.path}:{number}: {problem}")
                    else:
                        yield Document(f"{part.name}:{number}", text)
                if part.stop and position >= part.stop:
                    return

    def _text_of(self, line: bytes) -> tuple[str | None, str]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return None, f"not JSON ({error})"
        if not isinstance(record, dict):
            return None, f"not a JSON object but a {type(record).__name__}"
        text = record.get(self.text_key)
        if isinstance(text, str):
            return text, ""
        if self.text_key in record:
            return None, f"{self.text_key!r} is not a string but a {type(text).__name__}"
        return None, f"no key {self.text_key!r}, there are {sorted(record)}: set text_key"


@dataclass(frozen=True, kw_only=True)
class ParquetSource(RecordSource):
    """One row a document, streamed by row group; a null counts as malformed. Needs pyarrow."""

    kind: ClassVar[str] = "parquet"
    column: str = "text"

    def check(self) -> None:
        pyarrow, types = _pyarrow(), _pyarrow().types

        for _, path in self.inputs():
            try:
                schema = pyarrow.parquet.read_schema(path)
            except pyarrow.ArrowInvalid as error:
                raise ValueError(f"{path}: not a readable Parquet file ({error}): make it again") from None
            texts = []
            for item in schema:
                kind = item.type.value_type if types.is_dictionary(item.type) else item.type
                if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
                    texts.append(item.name)
            if self.column not in texts:
                raise ValueError(
                    f"{path}: no string column {self.column!r} (set column): {nearest(self.column, texts)}"
                )

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        pyarrow = _pyarrow()
        for name, path in self.inputs():
            first = 1
            with pyarrow.parquet.ParquetFile(path) as file:
                for number in range(file.metadata.num_row_groups):
                    group = file.metadata.row_group(number)
                    place = {"size": group.total_byte_size, "start": number, "first": first}
                    yield Part(name=name, path=str(path), documents=group.num_rows, **place)
                    first += group.num_rows

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        pyarrow = _pyarrow()
        number = part.first
        with pyarrow.parquet.ParquetFile(part.path) as file:
            for batch in file.iter_batches(batch_size=1024, row_groups=[part.start], columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    report.records += 1
                    if text is None:
                        report.skip("malformed", f"{part.path}: row {number}: {self.column!r} is null")
                    else:
                        yield Document(f"{part.name}:{number}", text)
                    number += 1


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Text files named one by one or by globs, one document each; one that is not UTF-8 text is an error."""

    kind: ClassVar[str] = "text"
    paths: tuple[str, ...]

    def inputs(self) -> list[tuple[str, Path]]:
        return _named_files(self.paths, self.kind)

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        text = _file_text(part, report)
        if text is None:
            raise ValueError(
                f"text source: {report.summary()}: convert it to UTF-8 or use a 'tree' source, which skips it"
            )
        yield Document(part.name, text)


@dataclass(frozen=True, kw_only=True)
class TreeSource(Source):
    """Files below a directory, one document a file; binary, undecodable and unreadable ones are counted.

    A glob is compared with the file's path below `root` (where `*` also crosses `/`) and with its name; an
    exclude glob also with every directory on the way. Links to directories are not followed.
    """

    kind: ClassVar[str] = "tree"
    root: str
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = (".git", ".hg", ".svn", ".venv", "__pycache__", "node_modules")

    def inputs(self) -> list[tuple[str, Path]]:
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(f"tree source: {root} is not a directory: set root")
        found = _walk(
            root,
            lambda name: _matches(name, self.include) and not _matches(name, self.exclude),
            skip_directories=self.exclude,
        )
        if not found:
            raise ValueError(f"tree source: no file below {root} matches include={list(self.include)} and not exclude")
        return found

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        text = _file_text(part, report)
        if text is not None:
            yield Document(part.name, text)


# --------------------------------------------------------------------------- offline corpora


@dataclass(frozen=True, kw_only=True)
class PythonStdlibSource(Source):
    """The .py files of Python's standard library, without tests and what differs between machines."""

    kind: ClassVar[str] = "python_stdlib"
    _times_matter: ClassVar[bool] = False

    def inputs(self) -> list[tuple[str, Path]]:
        # pydoc_data is prose, read by package_docs; config-* and _sysconfigdata hold this build's paths.
        skipped = ("test", "tests", "idlelib", "*-packages", "pydoc_data", "config-*", "__pycache__")
        local = ("_sysconfigdata*.py", "sitecustomize.py", "usercustomize.py")
        root = Path(sysconfig.get_path("stdlib"))
        found = _walk(root, lambda name: name.endswith(".py") and not _matches(name, local), skip_directories=skipped)
        return [(f"stdlib/{name}", path) for name, path in found]

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        text = _file_text(part, report)
        if text is not None:
            yield Document(part.name, text)


@dataclass(frozen=True, kw_only=True)
class InstalledSource(Source):
    """Files of the installed packages, without vendored copies and tests.

    packages: Only these top-level modules and distributions (empty: all), which pins what a stream holds.
    exclude_packages: By default this project, and installers, which differ with how an environment was made.
    """

    _times_matter: ClassVar[bool] = False
    packages: tuple[str, ...] = ()
    exclude_packages: tuple[str, ...] = (
        "nemo_ext",
        "hydra_conf",
        "launchers",
        "pip",
        "setuptools",
        "pkg_resources",
        "_distutils_hack",
    )

    def inputs(self) -> list[tuple[str, Path]]:
        wanted, unwanted = set(map(_package, self.packages)), set(map(_package, self.exclude_packages))
        found: dict[str, Path] = {}
        present: set[str] = set()
        skipped = ("test", "tests", "_vendor", "vendor", "__pycache__")
        for root in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
            for entry in sorted(os.listdir(root)):
                package = _package(entry)
                present.add(package)
                chosen = package in wanted if wanted else package not in unwanted
                if not chosen or entry.startswith("__editable__"):
                    continue
                if os.path.isdir(os.path.join(root, entry)):
                    for name, path in _walk(Path(root, entry), self._takes, skip_directories=skipped):
                        found.setdefault(f"site-packages/{entry}/{name}", path)
                elif self._takes(entry):
                    found.setdefault(f"site-packages/{entry}", Path(root, entry))
        for package in sorted(wanted - present):
            raise ValueError(f"{self.kind} source: package {package!r} is not installed: {nearest(package, present)}")
        if not found:
            raise ValueError(f"{self.kind} source: nothing to read in packages={list(self.packages)}")
        return sorted(found.items())

    def _takes(self, name: str) -> bool:
        """Whether a file is read, by its path in the package."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DocstringsSource(InstalledSource):
    """Docstrings of the installed packages: one document a module, each below the name it belongs to.

    A docstring repeated within a module is given once.
    """

    kind: ClassVar[str] = "docstrings"

    def _takes(self, name: str) -> bool:
        return name.endswith(".py")

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        source = _file_text(part, report)
        if source is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a package's invalid escapes are not the reader's news
                module = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            report.skip("unparsable", f"{part.name}: {error}")
            return
        # Without the module's name, so that copies of a module below another name are byte-identical.
        said: dict[str, str] = {}
        for name, docstring in _docstrings(module, ""):
            said.setdefault(docstring, f"{name}\n\n{docstring}\n" if name else f"{docstring}\n")
        if said:
            yield Document(part.name, "\n\n".join(said.values()))
        else:
            report.skip("no docstring", "")


@dataclass(frozen=True, kw_only=True)
class PackageDocsSource(InstalledSource):
    """Prose of the installed packages: READMEs (from METADATA), change logs, licences, C++ header comments.

    Of a header, the comments that read like sentences and are not its licence make one document. Unless
    `packages` is given, there is also the language reference that Python's `help` shows, a document a topic.
    """

    kind: ClassVar[str] = "package_docs"
    _PROSE: ClassVar[re.Pattern[str]] = re.compile(
        r"(readme|change|history|news|authors|contribut|licen[sc]e|copying|notice|howto|guide)", re.IGNORECASE
    )

    def inputs(self) -> list[tuple[str, Path]]:
        topics = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
        found = super().inputs()
        if topics.is_file() and not self.packages:
            found.append(("stdlib/pydoc_data/topics.py", topics))
        return found

    def _takes(self, name: str) -> bool:
        path = Path(name)
        if path.suffix in (".md", ".rst", *_HEADERS) or name == "METADATA":
            return True
        # Of the other .txt files most are for machines: entry points, requirements, CMake, tables.
        prose = self._PROSE.search(path.name) is not None
        return prose and (path.suffix in ("", ".txt") or name.startswith("licenses/"))

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        text = _file_text(part, report)
        if text is None:
            return
        if part.name.endswith("/METADATA"):
            message = email.message_from_string(text)
            yield Document(part.name, str(message.get_payload() or message.get("Description", "")))
        elif part.name.endswith("/topics.py"):
            for topic, body in _literal_topics(text).items():
                yield Document(f"{part.name}#{topic}", body)
        elif part.name.endswith(_HEADERS):
            if comments := dict.fromkeys(_prose_comments(text)):
                yield Document(part.name, "\n\n".join(comments) + "\n")
            else:
                report.skip("no prose comment", "")
        else:
            yield Document(part.name, text)


_CONCRETE: tuple[type[Source], ...] = (
    JsonlSource,
    ParquetSource,
    TextSource,
    TreeSource,
    PythonStdlibSource,
    DocstringsSource,
    PackageDocsSource,
)
KINDS: dict[str, type[Source]] = {source.kind: source for source in _CONCRETE}


# --------------------------------------------------------------------------------- the files


def _checked_value(key: str, value: object, where: str) -> object:
    """The option's value in the type that its dataclass field has."""
    if key in ("paths", "include", "exclude", "packages", "exclude_packages"):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, Sequence) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise ValueError(f"{where}: {key} must be a string or a list of strings, not {value!r}")
    if key == "max_bytes":
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise ValueError(f"{where}: max_bytes must be a positive whole number or null, not {value!r}")
    if key == "max_bad_share":
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
        raise ValueError(f"{where}: max_bad_share must be a share between 0 and 1, not {value!r}")
    expected = bool if key == "deduplicate" else str
    if isinstance(value, expected) and value != "":
        return value
    raise ValueError(f"{where}: {key} must be a {expected.__name__}, not {value!r}")


def _named_files(patterns: Collection[str], kind: str) -> list[tuple[str, Path]]:
    """Files behind paths and globs, each once, named by their path below their common directory."""
    if not patterns:
        raise ValueError(f"{kind} source: paths is empty: name at least one file")
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise ValueError(f"{kind} source: {path} is a directory: name its files, e.g. {path / '*'}")
        if path.is_file():
            found.add(path.absolute())
            continue
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        if not matches:
            raise FileNotFoundError(f"{kind} source: no such file: {path}")
        found.update(match.absolute() for match in matches if match.is_file())
    if not found:
        raise FileNotFoundError(f"{kind} source: only directories match {list(patterns)}")
    common = Path(os.path.commonpath([path.parent for path in found]))
    return sorted((path.relative_to(common).as_posix(), path) for path in found)


def _walk(root: Path, takes: Callable[[str], bool], *, skip_directories: Collection[str]) -> list[tuple[str, Path]]:
    """Files below `root` whose path below it is taken, as (that path, whole path), sorted."""
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not _matches(name, skip_directories)]
        below = directory[len(str(root)) :].replace(os.sep, "/").lstrip("/")
        for file in files:
            name = f"{below}/{file}" if below else file
            # The name comes first: there are many files, and a pipe among them must not be opened.
            if takes(name) and os.path.isfile(os.path.join(directory, file)):
                found.append((name, Path(directory, file)))
    return sorted(found)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    last = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, last))


def _package(entry: str) -> str:
    """Package that an entry of site-packages belongs to: `Torch-2.1.dist-info` and `torch.py` are `torch`."""
    if entry.endswith((".dist-info", ".egg-info")):
        entry = entry.rsplit(".", 1)[0].split("-", 1)[0]
    return re.sub(r"[-.]", "_", entry.removesuffix(".py")).lower()


def _file_text(part: Part, report: ReadReport) -> str | None:
    """Text of a UTF-8 file without its byte order mark, or None with the reason counted."""
    report.records += 1
    try:
        data = Path(part.path).read_bytes()
        if b"\0" in data:
            report.skip("binary", part.path)
            return None
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        report.skip("undecodable", f"{part.path}: byte {error.start}")
    except OSError as error:
        report.skip("unreadable", f"{part.path}: {error.strerror}")
    return None


def _pyarrow() -> ModuleType:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ValueError(f"Parquet and .zst files need pyarrow ({error}): pip install pyarrow") from error


def _open_lines(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return io.BufferedReader(_pyarrow().input_stream(path, compression="zstd"), buffer_size=1 << 20)
    return open(path, "rb")


def _whole_lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Lines of a file, with an error that names it when its compression is damaged."""
    try:
        while line := file.readline():
            yield line
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read to its end ({error}): copy or compress it again") from error


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of a node and of every class and function in it, in source order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring and not docstring.isspace():
            yield name, docstring
    # Only statements are visited: expressions hold no docstrings and are most of a tree.
    for block in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, block, None) or []:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}" if name else child.name)
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _docstrings(child, name)


def _literal_topics(source: str) -> dict[str, str]:
    """The `topics` dictionary of pydoc_data.topics, read without running it."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return {str(topic): str(body) for topic, body in ast.literal_eval(statement.value).items()}
    return {}


def _prose_comments(source: str) -> Iterator[str]:
    """Comments of C++ code, without their marks, that are a sentence or more and no licence."""
    for comment in re.findall(r"/\*.*?\*/|(?:^[ \t]*//[^\n]*\n)+", source, re.DOTALL | re.MULTILINE):
        lines = [re.sub(r"^\s*(/\*+[!<]*|//+[!<]*|\*(?!/)|) ?|\s*\**/?$", "", line) for line in comment.splitlines()]
        text = "\n".join(lines).strip()
        letters = sum(character.isalpha() or character.isspace() for character in text)
        licence = re.search(r"copyright|licen[sc]e|warrant", text, re.IGNORECASE)
        # Commented-out code and tables have far fewer letters than sentences.
        if len(text) >= 120 and letters >= 0.85 * len(text) and not licence:
            yield text
