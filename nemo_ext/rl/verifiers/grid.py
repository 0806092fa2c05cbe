"""Verifier for logic grid puzzles (ZebraLogic, arXiv:2502.01100), answered with a JSON object of all cells.

The answer's last JSON object is {"solution": {"House 1": {"Name": "Eric", ...}, ...}}, as in
github.com/WildEval/ZeroEval (zebra_grid_eval.py). A puzzle is solved if all its cells are correct.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict

_MOST_CHARACTERS = 100_000
_MOST_STARTS = 1000
"""Maximum number of opening braces at which an object is looked for, counted from the end."""
_DECODER = json.JSONDecoder()

Name = Annotated[str, Field(pattern=r"\S")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Solution of a puzzle: for each row, such as House 1, a mapping from attributes to values."""

    solution: Annotated[Mapping[Name, Annotated[Mapping[Name, Name], Field(min_length=1)]], Field(min_length=1)]


check = partial(checked, Reference, where="reference", strict=True)
"""Parses a task's reference, {solution: {ROW: {ATTRIBUTE: value}}}; raises ValueError if it is invalid."""


def verify(response: Response, reference: Reference) -> Verdict:
    """Return the verdict `correct` if every cell is correct, ignoring case.

    The verdict's `more["cells"]` is (number of correct cells, number of cells).
    """
    table = _last_object(response.answer)
    table = table.get("solution") if isinstance(table, dict) else None
    cells = [
        _same(table.get(row), attribute, value) if isinstance(table, dict) else False
        for row, values in reference.solution.items()
        for attribute, value in values.items()
    ]
    if all(cells):
        verdict = Verdict.correct()
    elif isinstance(table, dict):
        verdict = Verdict.wrong(f"{len(cells) - sum(cells)} of {len(cells)} cells are wrong")
    else:
        verdict = Verdict.wrong('no JSON object with the key "solution"')
    return replace(verdict, more={"cells": (sum(cells), len(cells))})


def _same(row: Any, attribute: str, value: str) -> bool:
    cell = row.get(attribute) if isinstance(row, dict) else None
    if isinstance(cell, list) and cell:
        cell = cell[0]
    return isinstance(cell, str) and cell.strip().lower() == value.strip().lower()


def _last_object(text: str) -> Any:
    """Return the last JSON object in a text that is not inside another one; None if there is none."""
    text, found, end = text[-_MOST_CHARACTERS:], None, 0
    starts = [place for place, character in enumerate(text) if character == "{"]
    for start in islice(starts, max(0, len(starts) - _MOST_STARTS), None):
        if start >= end:
            try:
                found, end = _DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
    return found


def environment() -> Environment:
    """Create the environment `grid`, for logic grid puzzles."""
    return Environment(name="grid", check=check, verify=verify)
