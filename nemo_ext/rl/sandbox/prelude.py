"""Names that answers use without importing them, as in the editors of coding contests.

The data's solutions leave out `from typing import List` and the like, and NeMo Gym's verifier runs every program after
star imports of twenty modules. Here only the names that occur in the source are imported; a program's own imports and
definitions come later and win.
"""

import builtins
import functools
import importlib
import re
import sys
from collections.abc import Mapping

# In the order of Gym's star imports: later ones win.
_STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
_WHOLE = tuple(module for module in _STARS if module != "typing")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_][\w., \t]*)", re.ASCII | re.MULTILINE)
# Importing these prints or opens something.
_LOUD = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "test"}
_LIBRARIES = {"numpy"}
# Modules that leave a process as it was, so that it may run again on the next test. These names are no barrier: a
# program that gets round them only meets its own leavings, and expected outputs are out of reach in any case.
_TIDY = {"__future__", "abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal"}
_TIDY |= {"enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "numpy", "operator"}
_TIDY |= {"os", "queue", "random", "re", "statistics", "string", "sys", "time", "typing"}
_UNTIDY = re.compile(r"__import__|importlib|\bfork|\bspawn|setitimer|sys\.modules|builtins|__builtins__|getcontext")


def prelude(source: str) -> str:
    """Import lines for the names that the source mentions."""
    stars, words = _star_names(), set(_WORD.findall(source))
    lines = [f"from {stars[word]} import {word}" for word in sorted(words & stars.keys())]
    # Whole modules come last, as in Gym: `datetime` and `copy` are the modules.
    return "\n".join(lines + [f"import {module}" for module in _WHOLE if module in words])


def preloaded(source: str) -> list[str]:
    """Modules imported by the source that may be imported once, before all of its runs."""
    found: dict[str, None] = {}
    for match in _IMPORT.finditer(source):
        for part in _imported(match):
            name = part.split()[0] if part.split() else ""
            top = name.split(".")[0]
            if top not in _LOUD and (top in sys.stdlib_module_names or top in _LIBRARIES):
                found[top] = None
    return list(found)


def reusable(source: str) -> bool:
    """True if a process that has run the program may run it again on another input as if it were a new process.

    NeMo Gym's verifier assumes that of all programs. Threads, signals and exit handlers, for example, outlive a run.
    """
    names = {
        name.strip().split(".")[0].split(" ")[0] for match in _IMPORT.finditer(source) for name in _imported(match)
    }
    return names <= _TIDY and not _UNTIDY.search(source)


def _imported(match: re.Match[str]) -> list[str]:
    return match[1].split(" import ")[0].split(",")


@functools.cache
def _star_names() -> Mapping[str, str]:
    names: dict[str, str] = {}
    for module in _STARS:
        found = importlib.import_module(module)
        exported = getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]
        # Built-in names are not overridden.
        names |= {name: module for name in exported if not hasattr(builtins, name)}
    return names
