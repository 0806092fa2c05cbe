"""Sources that need no download: code, docstrings and prose from Python and the installed packages."""

import ast
import email
import importlib.util
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nemo_ext.data.text.documents import Document, Part, ReadReport, Source, file_text
from nemo_ext.data.text.user_files import matches, walk
from nemo_ext.job.settings import Strings, nearest

_HEADERS = (".h", ".hpp", ".cuh")


@dataclass(frozen=True, kw_only=True)
class PythonStdlibSource(Source):
    """Python's standard library as a source: its .py files, except tests and machine-dependent files."""

    kind: ClassVar[str] = "python_stdlib"
    _times_matter: ClassVar[bool] = False

    def inputs(self) -> list[tuple[str, Path]]:
        # pydoc_data is prose, read by package_docs; config-* and _sysconfigdata hold this build's paths.
        skipped = ("test", "tests", "idlelib", "*-packages", "pydoc_data", "config-*", "__pycache__")
        local = ("_sysconfigdata*.py", "sitecustomize.py", "usercustomize.py")
        root = Path(sysconfig.get_path("stdlib"))
        files = walk(root, lambda name: name.endswith(".py") and not matches(name, local), skip_directories=skipped)
        return [(f"stdlib/{name}", path) for name, path in files]


@dataclass(frozen=True, kw_only=True)
class InstalledSource(Source):
    """Base class of sources that read files of installed packages, except vendored copies and tests.

    packages: Top-level modules and distributions to read (empty: all); naming them pins the contents of a stream.
    exclude_packages: Packages to exclude; by default this project, and installers, which differ by environment.
    """

    _times_matter: ClassVar[bool] = False
    packages: Strings = ()
    exclude_packages: Strings = (
        "nemo_ext",
        "hydra_conf",
        "launchers",
        "pip",
        "setuptools",
        "pkg_resources",
        "_distutils_hack",
    )

    def inputs(self) -> list[tuple[str, Path]]:
        included, excluded = set(map(_package, self.packages)), set(map(_package, self.exclude_packages))
        files: dict[str, Path] = {}
        present: set[str] = set()
        skipped = ("test", "tests", "_vendor", "vendor", "__pycache__")
        for root in [*sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}), *_roots(included)]:
            for entry in sorted(os.listdir(root)):
                package = _package(entry)
                present.add(package)
                chosen = package in included if included else package not in excluded
                if not chosen or entry.startswith("__editable__"):
                    continue
                if os.path.isdir(os.path.join(root, entry)):
                    for name, path in walk(Path(root, entry), self._takes, skip_directories=skipped):
                        files.setdefault(f"site-packages/{entry}/{name}", path)
                elif self._takes(entry):
                    files.setdefault(f"site-packages/{entry}", Path(root, entry))
        for package in sorted(included - present):
            advice = "run pip install 'nemo_ext[engine]', or remove it from `packages`"
            if package not in ("torch", "megatron"):
                advice = nearest(package, {name for name in present if not name.startswith("__")})
            raise ValueError(f"{self.kind} source: package {package!r} of `packages` is not installed; {advice}")
        if not files:
            raise ValueError(
                f"{self.kind} source: packages={list(self.packages)} have no files for this source: name other packages"
            )
        return sorted(files.items())

    def _takes(self, name: str) -> bool:
        """Return whether to read the file at this path within its package."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DocstringsSource(InstalledSource):
    """Docstrings of installed packages as a source: one document per module, each docstring below its object's name.

    A docstring that is repeated within a module is included once.
    """

    kind: ClassVar[str] = "docstrings"

    def _takes(self, name: str) -> bool:
        return name.endswith(".py")

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        source = file_text(part, report)
        if source is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a package's invalid escapes are irrelevant here
                module = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            report.skip("unparsable", f"{part.name}: {error}")
            return
        # Without the module's name, so that copies of a module under another name are byte-identical.
        sections: dict[str, str] = {}
        for name, docstring in _docstrings(module, ""):
            sections.setdefault(docstring, f"{name}\n\n{docstring}\n" if name else f"{docstring}\n")
        if sections:
            yield Document(part.name, "\n\n".join(sections.values()))
        else:
            report.skip("no docstring")


@dataclass(frozen=True, kw_only=True)
class PackageDocsSource(InstalledSource):
    """Prose of installed packages as a source: READMEs (from METADATA), change logs, licences, C++ header comments.

    The comments of a header that read like sentences, except its licence, form one document. Unless `packages` is set,
    the language reference of Python's `help` is included, one document per topic.
    """

    kind: ClassVar[str] = "package_docs"
    _PROSE: ClassVar[re.Pattern[str]] = re.compile(
        r"(readme|change|history|news|authors|contribut|licen[sc]e|copying|notice|howto|guide)", re.IGNORECASE
    )

    def inputs(self) -> list[tuple[str, Path]]:
        topics = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
        files = super().inputs()
        if topics.is_file() and not self.packages:
            files.append(("stdlib/pydoc_data/topics.py", topics))
        return files

    def _takes(self, name: str) -> bool:
        path = Path(name)
        if path.suffix in (".md", ".rst", *_HEADERS) or name == "METADATA":
            return True
        # Most other .txt files are for machines: entry points, requirements, CMake, tables.
        prose = self._PROSE.search(path.name) is not None
        return prose and (path.suffix in ("", ".txt") or name.startswith("licenses/"))

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        text = file_text(part, report)
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
                report.skip("no prose comment")
        else:
            yield Document(part.name, text)


def _roots(packages: set[str]) -> list[str]:
    """Return the folders from which Python imports these packages outside site-packages (`pip install --target`)."""
    outside: set[str] = set()
    for package in packages:
        if (spec := importlib.util.find_spec(package)) is not None:
            places = spec.submodule_search_locations or [spec.origin or "built-in"]
            outside |= {str(Path(place).parent) for place in places if os.path.exists(place)}
    return sorted(outside - {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _package(entry: str) -> str:
    """Return the package that an entry of site-packages belongs to, such as `torch` for `Torch-2.1.dist-info`."""
    if entry.endswith((".dist-info", ".egg-info")):
        entry = entry.rsplit(".", 1)[0].split("-", 1)[0]
    return re.sub(r"[-.]", "_", entry.removesuffix(".py")).lower()


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, docstring) for a node and every class and function in it, in source order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring and not docstring.isspace():
            yield name, docstring
    # Expressions are skipped: they are most of the tree and contain no docstrings.
    for block in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, block, None) or []:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}" if name else child.name)
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _docstrings(child, name)


def _literal_topics(source: str) -> dict[str, str]:
    """Read the `topics` dictionary of pydoc_data.topics without running it; return {} if it has none."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return {str(topic): str(body) for topic, body in ast.literal_eval(statement.value).items()}
    return {}


def _prose_comments(source: str) -> Iterator[str]:
    """Yield the comments of C++ code that read like sentences, except licences, without comment markers."""
    for comment in re.findall(r"/\*.*?\*/|(?:^[ \t]*//[^\n]*\n)+", source, re.DOTALL | re.MULTILINE):
        lines = [re.sub(r"^\s*(/\*+[!<]*|//+[!<]*|\*(?!/)|) ?|\s*\**/?$", "", line) for line in comment.splitlines()]
        text = "\n".join(lines).strip()
        letters = sum(character.isalpha() or character.isspace() for character in text)
        licence = re.search(r"copyright|licen[sc]e|warrant", text, re.IGNORECASE)
        # Commented-out code and tables have far fewer letters than sentences.
        if len(text) >= 120 and letters >= 0.85 * len(text) and not licence:
            yield text
