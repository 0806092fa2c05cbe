"""All rows of an input answered into a folder: for `nemo-ext generate`, and for jobs that ask in steps."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.checkpoint.storage import files_identity
from nemo_ext.endpoint.client import Answer, Client, Request
from nemo_ext.generate import report
from nemo_ext.generate.columns import renamed
from nemo_ext.generate.output import Output
from nemo_ext.generate.rows import Index, Rows
from nemo_ext.generate.settings import GenerateSettings
from nemo_ext.generate.work import Requests, TooManyDead, Work
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.leases import Leases
from nemo_ext.job.made_of import describe, differing, note, noted
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.run_directory import OWN

_MADE_OF, _INDEX = "made_of.json", "index.json"
A_DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class Asks:
    """What makes the requests, and the settings that answers depend on beside the rows and the model.

    Attributes:
        prompts: what makes the requests.
        made_of: the settings.
        known: answer of a request that need not be made; None where there is none.
    """

    prompts: Requests
    made_of: Mapping[str, Any]
    known: Callable[[Request], Answer | None] | None = None


async def answer_all(
    client: Client,
    rows: Rows,
    asks: Callable[[Index], Asks],
    folder: Path,
    *,
    samples: int,
    settings: GenerateSettings,
    label: str = "generate",
    otherwise: str = "name another folder, or go back to that",
) -> tuple[Output, Index]:
    """Answers to all rows in a folder, by as many workers as call this; returns the finished output and its index.

    Args:
        client: client of the endpoint, not yet entered.
        rows: the input.
        asks: makes the requests, once the input has been looked through.
        folder: folder of the output.
        samples: number of answers to each row.
        settings: how the work is done; the keys that make requests are not read.
        label: name of the work in what is shown.
        otherwise: advice where the folder was begun with other settings.

    Raises:
        ValueError: the input cannot be read, the output was begun with other settings, or the key is refused.
        TooManyDead: more answers failed than `settings.max_dead` allows.
        EndpointGone: nobody answers at the endpoint.
    """
    async with client:
        await client.check()
        index = _index(folder, rows, settings)
        if index.repeated:
            notice(f"input: {index.repeated:,} rows equal an earlier one, and are answered once")
        asked = asks(index)
        identity = {"input": index.digest, "model": client.address.model, "checkpoint": client.address.digest}
        if client.settings.omit:
            identity["omit"] = ", ".join(client.settings.omit)
        with only_run_in(folder / OWN, "output", wait=A_DAY):
            _check_made_of(folder, {**identity, **asked.made_of, "nemo_ext": __version__}, otherwise)
        output = Output(
            folder=folder,
            format=settings.format,
            schema=index.arrow_schema(),
            names=renamed(index.columns, settings.key),
            leases=Leases(folder / OWN / "leases", settings.lease),
            retry_dead=settings.retry_dead,
        )
        output.set_aside_damaged(index.ranges)
        total = index.rows * samples
        began, speed = time.monotonic(), _Speed()
        with _progress(label, total, _done(output, index), speed) as seen:
            while True:
                work = Work(
                    index=index,
                    rows=rows,
                    prompts=asked.prompts,
                    output=output,
                    samples=samples,
                    most_dead=settings.max_dead * total,
                    seen=seen,
                    dead=output.failed(index.ranges),
                    known=asked.known,
                )
                await work.run(client)
                if not output.set_aside_damaged(index.ranges):
                    break
    with only_run_in(folder / OWN, "output", wait=A_DAY):
        output.clear()
        counted = {"seconds": time.monotonic() - began, "answers": speed.answers, "tokens": speed.tokens}
        found = report.make(output, index, samples, client.address, counted)
    notice(found)
    if sum(len(output.failures(range_)) for range_ in index.ranges) > settings.max_dead * total:
        raise TooManyDead("those of all starts")
    return output, index


def held_part_rows(folder: Path) -> int:
    """Rows of the input in one file of an output that was begun."""
    return int(json.loads((folder / OWN / _INDEX).read_text())["part_rows"])


def made_of(folder: Path) -> dict[str, Any] | None:
    """The settings that an output was begun with; None if it was not."""
    before: dict[str, Any] | None = noted(folder / OWN / _MADE_OF)
    return before


def _index(folder: Path, rows: Rows, settings: GenerateSettings) -> Index:
    """What the first worker has found in the input; it is read again if it has changed since."""
    place = folder / OWN / _INDEX
    with only_run_in(folder / OWN, "output", wait=A_DAY):
        paths = [path for _, path in rows.source.inputs()]
        files = [str(paths), files_identity(paths)]  # the index has paths in it, and its folder may move
        if place.is_file():
            held = json.loads(place.read_text())
            if held["files"] == files and (held["key"], held["part_rows"]) == (settings.key, settings.part_rows):
                return Index.from_json(held["index"])
        index = rows.index(settings.part_rows)
        if not (folder / OWN / _MADE_OF).exists():  # else the settings decide first whether this may go on
            held = {"files": files, "key": settings.key, "part_rows": settings.part_rows, "index": index.as_json()}
            write_text(place, json.dumps(held))
        return index


def _check_made_of(folder: Path, now: Mapping[str, Any], otherwise: str) -> None:
    """Refuses an output of other settings; a newer version of this package is said."""
    before = made_of(folder)
    if before is None:
        note(folder / OWN / _MADE_OF, now)
        return
    changed = differing(before, now)
    version = changed.pop("nemo_ext", None)
    if "input" in changed:
        changed["input"] = "other rows"
    if changed:
        raise ValueError(f"output={folder}: was begun otherwise ({describe(changed)}): {otherwise}")
    if version is not None:
        notice(f"{folder}: was begun by another version of nemo_ext ({version})")


def _done(output: Output, index: Index) -> tuple[int, int]:
    """Numbers of answers and of failures that are there already."""
    answers = sum(len(output.answered(range_)) for range_ in index.ranges)
    return answers, sum(len(output.failures(range_)) for range_ in index.ranges)


@dataclass
class _Speed:
    """What has come in this start."""

    answers: int = 0
    tokens: int = 0


@contextmanager
def _progress(label: str, total: int, done: tuple[int, int], speed: _Speed) -> Iterator[Callable[[Answer], None]]:
    """Function that takes account of an answer in what is shown: answers, tokens a second, failures."""
    began, failed = time.monotonic(), done[1]

    def detail() -> str:
        return f"{speed.tokens / max(time.monotonic() - began, 1e-9):,.0f} tokens/s, {failed:,} failed"

    with progress_of(f"{label}:", total, unit="answers", detail=detail) as advance:
        advance(sum(done))

        def seen(answer: Answer) -> None:
            nonlocal failed
            speed.answers += not answer.problem
            speed.tokens += answer.completion_tokens or 0
            failed += bool(answer.problem)
            advance(1)

        yield seen
