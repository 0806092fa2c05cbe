"""Batch requests for `nemo-ext generate` and `synthesize`: answers to all input rows are written to a folder."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from nemo_ext.job.files import A_DAY, only_run_in, write_text
from nemo_ext.job.leases import Leases
from nemo_ext.job.made_of import describe, differing, note, noted
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.run_directory import OWN

_MADE_OF, _INDEX = "made_of.json", "index.json"


@dataclass(frozen=True, kw_only=True)
class Asks:
    """Builder of a batch's requests, with the settings that an output must keep to be resumed.

    Attributes:
        prompts: builder of the requests.
        made_of: the settings that affect the answers.
        known: function that returns an existing answer to a request, or None; None if there are no such answers.
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
    otherwise: str = "choose another folder, or restore those settings",
) -> tuple[Output, Index]:
    """Request answers to all rows and write them to a folder; several processes may share the work on one folder.

    Args:
        client: client of the endpoint, not yet entered with `async with`.
        asks: function that takes the index of the input and returns the builder of the requests.
        settings: batch job settings; the keys that define requests are ignored.
        otherwise: advice for the error message if the folder was started with different settings.

    Returns:
        The finished output and the index of its input.

    Raises:
        ValueError: the input cannot be read, the output was started with other settings, or the API key is rejected.
        TooManyDead: more answers failed than `settings.max_dead` allows.
        EndpointGone: the endpoint has not responded for longer than the client's patience.
    """
    async with client:
        await client.check()
        index = index_of(folder, rows, settings)
        if index.repeated:
            notice(f"input: {index.repeated:,} rows are equal to an earlier one; equal rows are answered once")
        requests = asks(index)
        identity = {"input": index.digest, "model": client.address.model, "checkpoint": client.address.digest}
        if client.settings.omit:
            identity["omit"] = ", ".join(client.settings.omit)
        with only_run_in(folder / OWN, "output", wait=A_DAY):
            _check_made_of(folder, {**identity, **requests.made_of, "nemo_ext": __version__}, otherwise)
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
        done = [sum(len(of(range_)) for range_ in index.ranges) for of in (output.answered, output.failures)]
        with _progress(label, total, done, speed) as seen:
            while True:
                work = Work(
                    index=index,
                    rows=rows,
                    prompts=requests.prompts,
                    output=output,
                    samples=samples,
                    most_dead=settings.max_dead * total,
                    seen=seen,
                    dead=output.failed(index.ranges),
                    known=requests.known,
                )
                await work.run(client)
                if not output.set_aside_damaged(index.ranges):
                    break
    with only_run_in(folder / OWN, "output", wait=A_DAY):
        output.clear()
        this_start = {"seconds": time.monotonic() - began, "answers": speed.answers, "tokens": speed.tokens}
        summary = report.make(output, index, samples, client.address, this_start)
    notice(summary)
    if sum(len(output.failures(range_)) for range_ in index.ranges) > settings.max_dead * total:
        raise TooManyDead("too many answers failed, counted over all starts")
    return output, index


def held_part_rows(folder: Path) -> int:
    """Return the number of input rows per part of an existing output."""
    return int(json.loads((folder / OWN / _INDEX).read_text())["part_rows"])


def made_of(folder: Path) -> dict[str, Any] | None:
    """Return the settings that an existing output was started with, or None for a new output."""
    before: dict[str, Any] | None = noted(folder / OWN / _MADE_OF)
    return before


def index_of(folder: Path, rows: Rows, settings: GenerateSettings) -> Index:
    """Return the index of the input, which the first worker builds; it is rebuilt if the input has changed."""
    place = folder / OWN / _INDEX
    with only_run_in(folder / OWN, "output", wait=A_DAY):
        paths = [path for _, path in rows.source.inputs()]
        files = [str(paths), files_identity(paths)]  # paths too: the index contains them, and folders may move
        if place.is_file():
            record = json.loads(place.read_text())
            if record["files"] == files and (record["key"], record["part_rows"]) == (settings.key, settings.part_rows):
                return Index.from_json(record["index"])
        index = rows.index(settings.part_rows)
        if not (folder / OWN / _MADE_OF).exists():  # otherwise `_check_made_of` decides first whether to resume
            record = {"files": files, "key": settings.key, "part_rows": settings.part_rows, "index": index.as_json()}
            write_text(place, json.dumps(record))
        return index


def _check_made_of(folder: Path, now: Mapping[str, Any], otherwise: str) -> None:
    """Check that an output was started with the settings `now`; for a new output, record them.

    If only the version of this package differs, a notice is printed.

    Raises:
        ValueError: other settings differ; the message ends with the advice `otherwise`.
    """
    before = made_of(folder)
    if before is None:
        note(folder / OWN / _MADE_OF, now)
        return
    changed = differing(before, now)
    version = changed.pop("nemo_ext", None)
    if "input" in changed:
        changed["input"] = "other rows"
    if changed:
        raise ValueError(f"output={folder} was started with different settings ({describe(changed)}): {otherwise}")
    if version is not None:
        notice(f"{folder} was started by another version of nemo_ext ({version}); this one resumes it")


@dataclass
class _Speed:
    """Numbers of answers and tokens received since this process started, excluding earlier runs of the job."""

    answers: int = 0
    tokens: int = 0


@contextmanager
def _progress(label: str, total: int, done: Sequence[int], speed: _Speed) -> Iterator[Callable[[Answer], None]]:
    """Show a progress bar of a batch job, and provide a callback to call with each answer.

    `done` holds the current numbers of answers and of failures.
    """
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
