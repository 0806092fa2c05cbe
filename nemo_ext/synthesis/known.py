"""Answers to requests of earlier rows: where the rows before a step change, the same questions are not asked again."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from nemo_ext.endpoint.client import Answer, Request
from nemo_ext.generate.columns import ANSWER
from nemo_ext.job.made_of import digest
from nemo_ext.synthesis.conversing import Play

_KEPT = tuple(name for name in ANSWER if name in {each.name for each in fields(Answer)})


class Known:
    """Answers by their requests, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, answers: Iterable[tuple[Request, Mapping[str, Any]]]) -> int:
        """Keep answers of requests; returns how many."""
        number = 0
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS known (request TEXT PRIMARY KEY, answer TEXT)")
            for request, answer in answers:
                held = orjson.dumps(
                    {name: answer[name] for name in _KEPT if name not in ("key", "sample")}, default=str
                )
                database.execute("INSERT OR REPLACE INTO known VALUES (?, ?)", (_name(request), held.decode()))
                number += 1
        return number

    def reader(self) -> Callable[[Request], Answer | None] | None:
        """Function of a request that returns its answer, or None; None if nothing is known."""
        if not self.path.exists():
            return None
        database = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)

        def answer(request: Request) -> Answer | None:
            found = database.execute("SELECT answer FROM known WHERE request = ?", (_name(request),)).fetchone()
            if found is None:
                return None
            held = orjson.loads(found[0])
            calls = held.pop("tool_calls") or ()
            held["tool_calls"] = tuple(json.loads(calls) if isinstance(calls, str) else calls)
            return Answer(key=request.key, sample=request.sample, status=200, **held)

        return answer


def _name(request: Request) -> str:
    """Name of a request by all that its answer depends on; its key and sample are in the seed."""
    asked: list[Any] = [request.path, dict(request.body)]
    return digest([*asked, request.row] if isinstance(request, Play) else asked)
