"""Filters for source code in recipes: code blocks, syntax and Pylint's score. No code is executed."""

import ast
import importlib
import io
import math
import re
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_ext.rl.answers import fences
from nemo_ext.rl.verifiers.code import TAGS, program

_LEAN = ("lean", "lean4")


def code(text: str | None, language: str = "") -> str:
    """Return the last code block in a language (by any of its tags), else the last block without a tag, else "".

    Without a language, the last of all blocks is returned.
    """
    return (code_blocks(text, language) or _blocks(text, {""}) or [""])[-1]


def code_blocks(text: str | None, language: str = "") -> list[str]:
    """Return the contents of all code blocks in a language (by any of its tags) or, without a language, of all."""
    return _blocks(text, TAGS.get(language, {language}) if language else None)


def _blocks(text: str | None, tags: Collection[str] | None) -> list[str]:
    blocks = ((tag, inner) for tag, inner, _, _ in fences(text or ""))
    return [f"{inner}\n" if inner else "" for tag, inner in blocks if tags is None or tag in tags]


def parses(text: str | None, language: str = "python") -> bool:
    """Whether a non-empty string is a syntactically valid program, by Python's parser or Tree-sitter (for cpp).

    Raises:
        ValueError: the language is not supported, or Tree-sitter is not installed.
    """
    if language not in TAGS:
        raise ValueError(f"parses({language!r}): unknown language; expected one of {', '.join(TAGS)}")
    if language != "python":
        tree = _tree_sitter(language).parse((text or "").encode())
        return bool(text) and not tree.root_node.has_error
    try:
        ast.parse(text or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text)


def lean_excluded(text: str | None, words: Sequence[str], start: str = "") -> list[str]:
    """Return the words that occur in Lean code, outside comments, more often than in `start`.

    The code is the answer's program, or the text itself without a code block. Words are compared whole: `extern` does
    not occur in `external`. In code with strings or quoted names, which may contain the marks of comments, comments
    count as well.
    """
    block = program(text or "", _LEAN)
    source, before = map(_without_lean_comments, (text or "" if block is None else block, start))
    patterns = {word: re.compile(rf"(?<![\w']){re.escape(word)}(?![\w'])") for word in words}
    return [word for word in words if len(patterns[word].findall(source)) > len(patterns[word].findall(before))]


def _without_lean_comments(source: str) -> str:
    if '"' in source or "«" in source:
        return source
    kept, depth, place = list[str](), 0, 0
    while (mark := re.compile(r"/-|-/" if depth else r"/-|--[^\n]*").search(source, place)) is not None:
        if not depth:
            kept.append(source[place : mark.start()])
        depth += {"/-": 1, "-/": -1}.get(mark.group(), 0)
        place = mark.end()
    return " ".join([*kept, "" if depth else source[place:]])


@cache
def _tree_sitter(language: str) -> Any:
    library, grammar = _module("tree_sitter"), _module(f"tree_sitter_{language}")
    return library.Parser(library.Language(grammar.language()))


def lint_score(text: str | None) -> float:
    """Return Pylint's score of a Python program: at most 10, without a lower limit; imports are not resolved.

    It is minus infinity for a program without statements or with a syntax error.

    Raises:
        ValueError: Pylint is not installed.
    """
    run, reporter = _module("pylint.lint").Run, _module("pylint.reporters").CollectingReporter()
    with TemporaryDirectory() as folder:
        program, settings = Path(folder, "program.py"), Path(folder, "pylintrc")
        program.write_text(text or "")
        settings.write_text("")  # otherwise the settings of the current folder apply
        words = [str(program), f"--rcfile={settings}", "--disable=import-error,no-name-in-module", "--jobs=1"]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            stats = run(words, reporter=reporter, exit=False).linter.stats
    if stats.fatal or not stats.statement:
        return -math.inf
    # Pylint's own formula sets negative scores to 0.
    return float(10 - 10 * (5 * stats.error + stats.warning + stats.refactor + stats.convention) / stats.statement)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name.partition('.')[0]} is missing: pip install 'nemo_ext[code]' ({error})") from None
