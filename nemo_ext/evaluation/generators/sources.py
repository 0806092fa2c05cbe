"""Texts that every Python brings: the sources of its standard library, and the docstrings in them.

Rows: id (with the Python version, since texts change with it), domain, module, text.
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
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "__pycache__", "site-packages", "turtledemo"}


def python_sources(
    count: int, *, seed: int, part: Part = "sources", characters: int = 2000
) -> Iterator[dict[str, Any]]:
    """Passages of modules of the standard library in random order, one of each.

    Args:
        count: number of rows.
        seed: seed.
        part: `sources`: lines of code; `docstrings`: the docstrings alone.
        characters: most characters of a passage; its last line is whole.

    Raises:
        ValueError: a setting is wrong, or there are fewer modules with so much text.
    """
    if part not in ("sources", "docstrings"):
        raise ValueError(f"settings.part: unknown {part!r}: {nearest(str(part), ('sources', 'docstrings'))}")
    checked_whole("settings.characters", characters, least=100)
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = 0
    for path in _in_random_order(folder, seed):
        if found == count:
            return
        module = path.relative_to(folder).with_suffix("").as_posix()
        text = _passage(path, module, seed, part, characters)
        if text is None:
            continue
        found += 1
        yield {
            "id": f"python-{platform.python_version()}/{part}/{characters}/{seed}/{module}",
            "domain": part,
            "module": module,
            "text": text,
        }
    if found < count:
        raise ValueError(f"count={count}: {folder} has {found} modules with {characters} characters of {part}")


@cache
def _in_random_order(folder: Path, seed: int) -> tuple[Path, ...]:
    return tuple(
        sorted(_modules(folder), key=lambda path: digest(seed, "python_sources", str(path.relative_to(folder))))
    )


def _modules(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if parts[0].removesuffix(".py") in sys.stdlib_module_names and not _LEFT_OUT & set(parts):
            yield path


@lru_cache(maxsize=1024)
def _passage(path: Path, module: str, seed: int, part: Part, characters: int) -> str | None:
    """Lines from a random one on; None where the module has too few."""
    try:
        text = path.read_text(encoding="utf-8")
        if part == "docstrings":
            text = "\n\n".join(_docstrings(text))
    except (UnicodeDecodeError, SyntaxError):  # some modules are there to be wrong
        return None
    if len(text) < characters:
        return None
    lines = text.splitlines(keepends=True)
    sizes = [len(line) for line in lines]
    last = len(lines)
    after = 0
    while last > 0 and after < characters:  # the last line with so much text from it on
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
            found = ast.get_docstring(node)
            if found:
                yield found
