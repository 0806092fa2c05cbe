"""Cache of answers keyed by request, so that identical requests are not resent when a step's input rows change."""

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
    """Answers keyed by request, in an SQLite file that is written once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, answers: Iterable[tuple[Request, Mapping[str, Any]]]) -> int:
        """Write answers to the file; return their number."""
        new = unfinished(self.path)
        new.unlink(missing_ok=True)
        with closing(sqlite3.connect(new)) as database, database:
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("CREATE TABLE known (request TEXT PRIMARY KEY, answer TEXT)")
            for request, answer in answers:
                text = orjson.dumps({name: answer[name] for name in _KEPT}, default=str).decode()
                database.execute("INSERT OR REPLACE INTO known VALUES (?, ?)", (_name(request), text))
            (number,) = database.execute("SELECT count(*) FROM known").fetchone()
        new.replace(self.path)
        return int(number)

    def reader(self) -> Callable[[Request], Answer | None] | None:
        """Return a function that looks up the answer to a request (None if unknown), or None if there is no file."""
        if not self.path.exists():
            return None
        database = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)

        def answer(request: Request) -> Answer | None:
            row = database.execute("SELECT answer FROM known WHERE request = ?", (_name(request),)).fetchone()
            if row is None:
                return None
            values = orjson.loads(row[0])
            calls = values.pop("tool_calls") or ()
            values["tool_calls"] = tuple(json.loads(calls) if isinstance(calls, str) else calls)
            return Answer(key=request.key, sample=request.sample, status=200, **values)

        return answer


def _name(request: Request) -> str:
    """Return the digest of everything that a request's answer depends on.

    Key and sample number are not included, because the seed in the request's body is derived from them.
    """
    content: list[Any] = [request.path, dict(request.body)]
    return digest([*content, request.row] if isinstance(request, Play) else content)
