"""Answers to requests of earlier rows: where the rows before a step change, the same questions are not asked again."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from nemo_ext.endpoint.client import Answer, Request
from nemo_ext.generate.columns import ANSWER
from nemo_ext.job.files import unfinished
from nemo_ext.job.made_of import digest
from nemo_ext.synthesis.conversing import Play

_KEPT = tuple(name for name in ANSWER if name not in ("key", "sample"))


class Known:
    """Answers by their requests, in a file that is written once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, answers: Iterable[tuple[Request, Mapping[str, Any]]]) -> int:
        """Write the file; returns how many answers are in it."""
        new = unfinished(self.path)
        new.unlink(missing_ok=True)
        with closing(sqlite3.connect(new)) as database, database:
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("CREATE TABLE known (request TEXT PRIMARY KEY, answer TEXT)")
            for request, answer in answers:
                held = orjson.dumps({name: answer[name] for name in _KEPT}, default=str).decode()
                database.execute("INSERT OR REPLACE INTO known VALUES (?, ?)", (_name(request), held))
            (number,) = database.execute("SELECT count(*) FROM known").fetchone()
        new.replace(self.path)
        return int(number)

    def reader(self) -> Callable[[Request], Answer | None] | None:
        """Function of a request that returns its answer, or None; None if there is no file."""
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
