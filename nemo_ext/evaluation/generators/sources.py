"""Texts from Python's standard library: its source code, or the docstrings in it.

Columns of a row: id (with the Python version, since texts differ between versions), domain, module, text.
"""

import ast
import platform
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from nemo_ext.job.seeds import digest, generator
from nemo_ext.job.settings import checked_whole, nearest

Part = Literal["sources", "docstrings"]
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "site-packages", "turtledemo"}


def python_sources(
    count: int, *, seed: int, part: Part = "sources", characters: int = 2000
) -> Iterator[dict[str, Any]]:
    """Yield passages from standard library modules, one per module, with the modules in random order.

    Args:
        part: `sources` for lines of code, `docstrings` for docstrings only.
        characters: maximum length of a passage in characters; a passage ends with a complete line.

    Raises:
        ValueError: a setting is invalid, or too few modules have that much text.
    """
    if part not in ("sources", "docstrings"):
        raise ValueError(f"settings.part: unknown part {part!r}: {nearest(str(part), ('sources', 'docstrings'))}")
    checked_whole("settings.characters", characters, least=100)
    folder = Path(sysconfig.get_paths()["stdlib"])
    yielded = 0
    for path in _in_random_order(folder, seed):
        if yielded == count:
            return
        module = path.relative_to(folder).with_suffix("").as_posix()
        text = _passage(path, module, seed, part, characters)
        if text is None:
            continue
        yielded += 1
        yield {
            "id": f"python-{platform.python_version()}/{part}/{characters}/{seed}/{module}",
            "domain": part,
            "module": module,
            "text": text,
        }
    if yielded < count:
        raise ValueError(
            f"count={count}: only {yielded} modules in {folder} have {characters} characters of {part}; lower count"
        )


@cache
def _in_random_order(folder: Path, seed: int) -> tuple[Path, ...]:
    modules = [
        path
        for path in folder.rglob("*.py")
        if (parts := path.relative_to(folder).parts)[0].removesuffix(".py") in sys.stdlib_module_names
        and not _EXCLUDED & set(parts)
    ]
    return tuple(sorted(modules, key=lambda path: digest(seed, "python_sources", str(path.relative_to(folder)))))


@lru_cache(maxsize=1024)
def _passage(path: Path, module: str, seed: int, part: Part, characters: int) -> str | None:
    """Return lines of a module from a random one on; None if it has too little text or cannot be parsed.

    The choice of the first line depends on the module's name and the seed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if part == "docstrings":
            text = "\n\n".join(filter(None, _docstrings(text)))
    except (UnicodeDecodeError, SyntaxError):  # some modules are invalid on purpose
        return None
    if len(text) < characters:
        return None
    lines = text.splitlines(keepends=True)
    sizes = [len(line) for line in lines]
    last = len(lines)
    after = 0
    while last > 0 and after < characters:  # last line that still has a full passage after it
        last -= 1
        after += sizes[last]
    begin = int(generator(seed, "passage", module, part).integers(last + 1))
    passage = ""
    for line in lines[begin:]:
        if len(passage) + len(line) > characters:
            break
        passage += line
    return passage if len(passage) >= characters // 2 else None


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
