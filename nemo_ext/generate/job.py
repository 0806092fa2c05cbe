"""The `nemo-ext generate` job: sends rows to an endpoint and writes them with their answers (docs/generate.md)."""

import asyncio
import contextlib
import glob
import json
import os
import signal
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_ext.endpoint.client import Client, EndpointGone
from nemo_ext.generate.batch import Asks, answer_all
from nemo_ext.generate.prompts import Prompts
from nemo_ext.generate.rows import Index, Rows, is_batch
from nemo_ext.generate.settings import Settings
from nemo_ext.generate.work import TooManyDead, try_requests
from nemo_ext.job.job import JobFailed
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import checked
from nemo_ext.serving.meanwhile import endpoint_of
from nemo_ext.serving.model import check as check_model
from nemo_ext.serving.settings import ServingSettings

_SHOWN, _TRIED = 3, 20
_CHARACTERS = 4


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext generate`; the same command resumes it.

    Raises:
        ValueError, JobFailed, OSError: see `answer`.
    """
    settings = _checked(config)
    if not settings.generate.dry_run:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C
        answer(config)
        return
    rows = Rows.from_paths(settings.input, settings.generate.key)
    index = rows.index(settings.generate.part_rows)
    _show(index, rows, _prompts(settings, index), settings)


def answer(config: Mapping[str, Any]) -> None:
    """Request the answers to all rows of the input that have none, and write the output.

    Raises:
        ValueError: a setting is invalid, the input cannot be read, or the output was started with other settings.
        JobFailed: more answers failed than `generate.max_dead` allows, or the endpoint does not respond.
        OSError: a file cannot be written.
    """
    settings = _checked(config)
    generate, folder = settings.generate, Path(settings.output).expanduser()
    rows = Rows.from_paths(settings.input, generate.key)

    def asks(index: Index) -> Asks:
        prompts = _prompts(settings, index)
        try_requests(prompts, rows.read(index.ranges[0])[:_TRIED])
        return Asks(prompts=prompts, made_of=_made_of(settings, prompts))

    try:
        with endpoint_of(config, folder / OWN) as (endpoint, model, _):
            client = Client(endpoint, generate.client, model=model, key_variable=settings.key_variable)
            _complete(answer_all(client, rows, asks, folder, samples=settings.samples, settings=generate))
    except TooManyDead as error:
        raise JobFailed(
            f"generate.max_dead={generate.max_dead:g} is exceeded: {error}; see the reasons in "
            f"{folder / 'dead'}, then fix the cause and set generate.retry_dead=true, or raise generate.max_dead"
        ) from None
    except EndpointGone as error:
        raise JobFailed(f"{error}; the same command resumes") from None


def _complete(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine to its end, in a new thread if the current one already has an event loop, as in a notebook.

    A KeyboardInterrupt cancels the coroutine and is raised when it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    running = list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

    async def cancellable() -> None:
        if (task := asyncio.current_task()) is not None:
            running.append((asyncio.get_running_loop(), task))
        await work

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, cancellable())
        try:
            done.result()
        except KeyboardInterrupt:
            for loop, task in running:
                with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                    loop.call_soon_threadsafe(task.cancel)
            raise


def check(config: Mapping[str, Any]) -> None:
    """Validate a config of `nemo-ext generate` before its first request; input that does not exist yet is skipped.

    Raises:
        ValueError: a setting is invalid, the input cannot be read, or no request can be made from its first rows.
    """
    settings = _checked(config)
    generate = settings.generate
    if not all(glob.glob(os.path.expanduser(word)) for word in settings.input):
        return
    if first := Rows.from_paths(settings.input, generate.key).first(_TRIED):
        prompts = Prompts.from_settings(generate, settings.seed, columns=list(first[0]), batch=is_batch(first[0]))
        try_requests(prompts, first)


def _checked(config: Mapping[str, Any]) -> Settings:
    settings = checked(Settings, config)
    if settings.endpoint is None:
        check_model(str(settings.served), ServingSettings.from_config(config), config)
    return settings


def _prompts(settings: Settings, index: Index) -> Prompts:
    return Prompts.from_settings(settings.generate, settings.seed, columns=index.columns, batch=index.batch)


def _made_of(settings: Settings, prompts: Prompts) -> dict[str, Any]:
    return {
        "samples": settings.samples,
        "seed": settings.seed,
        "generate": {"format": settings.generate.format, "part_rows": settings.generate.part_rows, **prompts.made_of()},
    }


def _show(index: Index, rows: Rows, prompts: Prompts, settings: Settings) -> None:
    """Print up to three requests and an estimate of the total number of tokens."""
    first, bodies = rows.read(index.ranges[0]), list[Mapping[str, Any]]()
    try_requests(prompts, first[:_TRIED])
    for row in first:
        with contextlib.suppress(ValueError):  # would become a dead letter
            bodies.append(prompts.request(row, 0).body)
    hidden = {"seed", *settings.generate.client.omit}
    for body in bodies[:_SHOWN]:
        print(
            json.dumps(
                {name: value for name, value in body.items() if name not in hidden}, ensure_ascii=False, indent=1
            )
        )
    messages = (message for body in bodies for message in body.get("messages") or [{"content": body.get("prompt")}])
    characters = sum(len(str(message.get("content") or "")) for message in messages) / len(bodies)
    total = index.rows * settings.samples
    prompt_tokens = characters / _CHARACTERS * total
    longest = settings.generate.sampling.max_tokens
    most = f", at most {longest * total:,} answer tokens" if longest else ""
    repeated = f" ({index.repeated:,} more are equal to an earlier row)" if index.repeated else ""
    print(
        f"{index.rows:,} rows{repeated} x {settings.samples} samples = {total:,} answers; "
        f"about {prompt_tokens:,.0f} prompt tokens ({_CHARACTERS} characters each){most}"
    )
