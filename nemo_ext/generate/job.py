"""The generate job: rows in, answers beside them out (docs/generate.md)."""

import asyncio
import contextlib
import glob
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as pydantic_dataclass

from nemo_ext.endpoint.client import Client, EndpointGone
from nemo_ext.generate.batch import Asks, answer_all
from nemo_ext.generate.prompts import Prompts
from nemo_ext.generate.rows import Index, Rows, is_batch
from nemo_ext.generate.settings import GenerateSettings
from nemo_ext.generate.work import TooManyDead
from nemo_ext.job.config import FAILED
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import STRICT, Count, Place, Places, checked
from nemo_ext.serving.meanwhile import endpoint_of
from nemo_ext.serving.model import check as check_model
from nemo_ext.serving.settings import ServingSettings

_SHOWN, _TRIED = 3, 20
_CHARACTERS = 4


@pydantic_dataclass(frozen=True, kw_only=True, config=STRICT)
class Given:
    """The config's own keys.

    Attributes:
        endpoint: run directory of `nemo-ext serve`, or URL; None serves a model here meanwhile.
        input: .parquet or .jsonl files; globs too.
        output: folder of the answers.
        samples: number of answers to each row.
        served: name of the model at the endpoint, where it serves several; or without an endpoint the model's folder.
        key_variable: environment variable with the endpoint's key.
        seed: seed of the answers.
        generate: see `GenerateSettings`.
    """

    input: Places
    output: Place
    endpoint: Place | None = None
    samples: Count = 1
    served: str | None = None
    key_variable: str | None = None
    seed: int = 1234
    generate: Mapping[str, Any] = field(default_factory=dict)
    serving: Mapping[str, Any] = field(default_factory=dict)
    files_from: Place | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.endpoint is None and self.served is None:
            raise ValueError("endpoint: name one (a run directory of `nemo-ext serve`, or a URL), or a folder in model")


def run(config: Mapping[str, Any]) -> None:
    """Ask the endpoint for answers to all rows, as the config says.

    Raises:
        ValueError: a wrong setting, an input that cannot be read, or an output that was made with other settings.
        OSError: a file cannot be written.
    """
    given, settings = _checked(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C
    folder = Path(given.output).expanduser()
    rows = Rows.of(given.input, settings.key)
    if settings.dry_run:
        index = rows.index(settings.part_rows)
        _show(index, rows, _prompts(settings, index, given.seed), given, settings)
        return
    try:
        with endpoint_of(config, folder / OWN) as (endpoint, model, _):
            client = Client(endpoint, settings.client, model=model, key_variable=given.key_variable)

            def asks(index: Index) -> Asks:
                prompts = _prompts(settings, index, given.seed)
                _try(prompts, rows.read(index.ranges[0]))
                return Asks(prompts=prompts, made_of=_made_of(given, settings, prompts))

            asyncio.run(answer_all(client, rows, asks, folder, samples=given.samples, settings=settings))
    except TooManyDead as error:
        _fail(
            f"{folder}: more than generate.max_dead={settings.max_dead:g} of the answers failed, last: {error}; "
            f"{folder / 'dead'} says why; mend that and give generate.retry_dead=true, or raise generate.max_dead"
        )
    except EndpointGone as error:
        _fail(f"{error}; the same command goes on")


def check(config: Mapping[str, Any]) -> None:
    """Refuse what the job would refuse before its first request; input that an earlier job has to write is not seen.

    Raises:
        ValueError: see `run`.
    """
    given, settings = _checked(config)
    if not all(glob.glob(os.path.expanduser(word)) for word in given.input):
        return
    if first := Rows.of(given.input, settings.key).first(_TRIED):
        prompts = Prompts.of(settings, given.seed, columns=list(first[0]), batch=is_batch(first[0]))
        _try(prompts, first)


def _try(prompts: Prompts, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuses prompts that fit none of the first rows: that costs nothing yet."""
    problems = []
    for row in rows[:_TRIED]:
        try:
            prompts.request(row, 0)
            return
        except ValueError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _checked(config: Mapping[str, Any]) -> tuple[Given, GenerateSettings]:
    given = checked(Given, config)
    settings = GenerateSettings.of(given.generate)
    if Path(given.output).expanduser().is_file():
        raise ValueError(f"output={given.output}: is a file: name a folder")
    if given.key_variable is not None and not os.environ.get(given.key_variable):
        raise ValueError(f"key_variable: the environment variable {given.key_variable} is not set")
    if given.endpoint is None:
        check_model(str(given.served), ServingSettings.of(config), config)
    return given, settings


def _prompts(settings: GenerateSettings, index: Index, seed: int) -> Prompts:
    return Prompts.of(settings, seed, columns=index.columns, batch=index.batch)


def _fail(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(FAILED)


def _made_of(given: Given, settings: GenerateSettings, prompts: Prompts) -> dict[str, Any]:
    return {
        "samples": given.samples,
        "seed": given.seed,
        "generate": {"format": settings.format, "part_rows": settings.part_rows, **prompts.made_of()},
    }


def _show(index: Index, rows: Rows, prompts: Prompts, given: Given, settings: GenerateSettings) -> None:
    """Prints three requests and what all of them may take."""
    first, bodies = rows.read(index.ranges[0]), list[Mapping[str, Any]]()
    _try(prompts, first)
    for row in first:
        with contextlib.suppress(ValueError):  # a dead letter then
            bodies.append(prompts.request(row, 0).body)
    hidden = {"seed", *settings.client.omit}
    for body in bodies[:_SHOWN]:
        print(
            json.dumps(
                {name: value for name, value in body.items() if name not in hidden}, ensure_ascii=False, indent=1
            )
        )
    characters = sum(len(_text_of(body)) for body in bodies) / len(bodies)
    total = index.rows * given.samples
    prompt_tokens = characters / _CHARACTERS * total
    most = f", at most {settings.sampling.max_tokens * total:,} of answers" if settings.sampling.max_tokens else ""
    repeated = f" ({index.repeated:,} more equal an earlier row)" if index.repeated else ""
    print(
        f"{index.rows:,} rows{repeated} x {given.samples} samples = {total:,} answers; "
        f"about {prompt_tokens:,.0f} tokens of prompts ({_CHARACTERS} characters each){most}"
    )


def _text_of(body: Mapping[str, Any]) -> str:
    messages: Sequence[Mapping[str, Any]] = body.get("messages") or [{"content": body.get("prompt")}]
    return "".join(str(message.get("content") or "") for message in messages)
