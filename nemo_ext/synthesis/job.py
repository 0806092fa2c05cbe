"""The synthesize job: a recipe's steps, one after the other, and its files (docs/synthetic.md)."""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.endpoint.client import Client, EndpointGone
from nemo_ext.generate.batch import A_DAY
from nemo_ext.generate.work import TooManyDead
from nemo_ext.job.config import FAILED
from nemo_ext.job.files import only_run_in
from nemo_ext.job.made_of import digest, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import check_keys, checked
from nemo_ext.rl.environments import make, settings_of
from nemo_ext.serving.meanwhile import endpoint_of
from nemo_ext.serving.model import check as check_model
from nemo_ext.serving.settings import ServingSettings
from nemo_ext.synthesis import outputs, plain, report
from nemo_ext.synthesis.asking import Asking, answered
from nemo_ext.synthesis.canaries import Fooled
from nemo_ext.synthesis.context import Context, Counts
from nemo_ext.synthesis.rows import FirstRows, Row, RowFile, files_of, read_input, written
from nemo_ext.synthesis.settings import Ask, Converse, Recipe, Screen, Settings, Step, Verify, WorkSettings
from nemo_ext.synthesis.verifying import Verifying

_DONE, _ROWS, _STEPS = "done.json", "rows.jsonl", "steps"
_TRIED = 50


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a role is asked, as `Client` takes it."""

    endpoint: str
    model: str | None
    key_variable: str | None


def run(config: Mapping[str, Any]) -> None:
    """Make the data, as the config says; the same again goes on.

    Raises:
        ValueError: a wrong setting, an input that cannot be read, or answers that were asked otherwise.
        OSError: a file cannot be written.
    """
    given, recipe, work = _checked(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C
    if work.dry_run:
        _show(given, recipe)
        return
    folder = Path(given.output).expanduser()
    try:
        with _places(config, given, recipe, folder) as places:
            _Run(given=given, recipe=recipe, work=work, folder=folder, places=places).run()
    except TooManyDead as error:
        _fail(
            f"{folder}: more than synthesize.max_dead={work.max_dead:g} of a step's answers failed, last: {error}; "
            "steps/*/answers-*/dead says why; mend that and give synthesize.retry_dead=true, or raise max_dead"
        )
    except EndpointGone as error:
        _fail(f"{error}; the same command goes on")
    except Fooled as error:
        _fail(str(error))


def check(config: Mapping[str, Any]) -> None:
    """Refuse what the job would refuse before its first request; input that an earlier job has to write is not seen.

    Raises:
        ValueError: see `run`.
    """
    given, recipe, _ = _checked(config)
    try:
        there = files_of(given.input)
    except ValueError:
        there = []
    if there:
        _first_request(given, recipe)


def _checked(config: Mapping[str, Any]) -> tuple[Settings, Recipe, WorkSettings]:
    given = checked(Settings, config)
    recipe, work = Recipe.of(config), given.synthesize
    if Path(given.output).expanduser().is_file():
        raise ValueError(f"output={given.output}: is a file: name a folder")
    for name, step in recipe.steps.items():
        if isinstance(step, Screen):
            plain.screen_of(step, f"steps.{name}")
        if isinstance(step, Verify | Converse) and step.environment is not None:
            _check_environment(f"steps.{name}", step)
    for role in recipe.asked():
        place = recipe.place(role)
        if place.endpoint is None and given.endpoint is None and given.served is None:
            raise ValueError(
                f"roles.{role}.endpoint: name one (a run directory of `nemo-ext serve`, or a URL), or endpoint= for "
                "all roles, or a folder in model"
            )
        variable = place.key_variable or (given.key_variable if place.endpoint is None else None)
        if variable is not None and not os.environ.get(variable):
            raise ValueError(f"roles.{role}.key_variable: the environment variable {variable} is not set")
    if given.endpoint is None and given.served is not None:
        check_model(given.served, ServingSettings.of(config), config)
    return given, recipe, work


def _check_environment(where: str, step: Verify | Converse) -> None:
    try:
        known, settings = settings_of(str(step.environment)), dict(step.settings)
        judged = isinstance(step, Verify) and step.judge is not None
        if judged and "judge" not in known:
            raise ValueError(f"judge: {step.environment} asks no judge")
        if known.get("judge") and not judged:
            raise ValueError(f"judge: {step.environment} wants one: name a role")
        check_keys(settings, tuple(known), required=(), where="settings")
        if not judged:
            found = make(str(step.environment), settings)
            if (found.begin is None) == isinstance(step, Converse):
                kind = "converse" if isinstance(step, Verify) else "verify"
                raise ValueError(f"environment={step.environment}: is for steps of kind {kind}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


@contextmanager
def _places(config: Mapping[str, Any], given: Settings, recipe: Recipe, folder: Path) -> Iterator[dict[str, _Place]]:
    """Where each role is asked; a folder in `model` is served meanwhile."""
    own = {role: recipe.place(role) for role in recipe.asked()}
    places = {
        role: _Place(endpoint=each.endpoint, model=each.model, key_variable=each.key_variable)
        for role, each in own.items()
        if each.endpoint is not None
    }
    if len(places) == len(own):
        yield places
        return
    with endpoint_of(config, folder / OWN) as (endpoint, model, _):
        for role, each in own.items():
            if role not in places:
                variable = each.key_variable or given.key_variable
                places[role] = _Place(endpoint=endpoint, model=each.model or model, key_variable=variable)
        yield places


def _fail(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(FAILED)


@dataclass(kw_only=True)
class _Run:
    """A recipe at work.

    Attributes:
        given, recipe, work: what the user wants.
        folder: folder of the output.
        places: where each role is asked.
    """

    given: Settings
    recipe: Recipe
    work: WorkSettings
    folder: Path
    places: Mapping[str, _Place]
    _models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Do what is left to do of the steps, then write the files."""
        asyncio.run(self._reach())
        rows, identity, read = self._input()
        made: dict[str, tuple[RowFile, str, Counts]] = {}
        for number, (name, step) in enumerate(self.recipe.steps.items(), start=1):
            label = f"step {number} of {len(self.recipe.steps)}, {name}"
            rows, identity, counts = made[name] = self._step(name, step, rows, identity, label)
            if not counts.made:
                left = "; ".join(
                    f"{count:,} {reason}, such as {counts.examples[reason][0]}"
                    for reason, count in counts.dropped.most_common(4)
                )
                why = left or f"the step makes none of the {counts.rows:,} before it"
                _fail(f"steps.{name}: no row is left: {why} ({rows.path.parent / _DONE} has more)")
        with only_run_in(self.folder / OWN, "output", wait=A_DAY):
            self._write(made, read)

    async def _reach(self) -> None:
        for role in self.recipe.asked():
            async with self._client(role) as client:
                await client.check()
                self._models[role] = {"model": client.address.model, "checkpoint": client.address.digest}

    def _client(self, role: str) -> Client:
        place = self.places[role]
        return Client(place.endpoint, self.work.client, model=place.model, key_variable=place.key_variable)

    def _input(self) -> tuple[RowFile, str, dict[str, int]]:
        """Rows of the input, what they are, and how many."""
        folder = self.folder / OWN / "input"
        with only_run_in(folder, "output", wait=A_DAY):
            identity = digest([[name, _hash(path)] for name, path in files_of(self.given.input)])
            record = folder / _DONE
            if (held := noted(record) or {}).get("identity") != identity:
                record.unlink(missing_ok=True)
                rows, repeated = read_input(self.given.input, folder / _ROWS)
                note(record, held := {"identity": identity, "rows": rows, "repeated": repeated})
        return RowFile(folder / _ROWS), identity, {"rows": held["rows"], "repeated": held["repeated"]}

    def _step(self, name: str, step: Step, rows: RowFile, before: str, label: str) -> tuple[RowFile, str, Counts]:
        """A step's rows, made unless they are there."""
        folder = self.folder / _STEPS / name
        canaries = {"canaries": self.work.canaries} if getattr(step, "canaries", None) is not None else {}
        models = {role: self._models[role] for role in step.roles()}
        settings = json.loads(json.dumps(asdict(step), default=str))
        reads = plain.screen_of(step, f"steps.{name}").reads() if isinstance(step, Screen) else []
        files = [_hash(path) for path in reads]
        identity = digest([name, step.kind, settings, models, files, self.given.seed, canaries, before, __version__])
        record, file = folder / _DONE, RowFile(folder / _ROWS)
        done = self._done(record, identity)
        again = done is not None and self.work.retry_dead and bool(done[0].dropped.get("no answer"))
        if done is None or again:
            context = Context(name=name, folder=folder, rows=rows, seed=self.given.seed)
            notice(f"{label}: {len(rows):,} rows")
            answers = None
            if isinstance(step, Ask | Converse):
                clients = {role: self._client(role) for role in step.roles()}
                asking = Asking(step=step, context=context, clients=clients, work=self.work, models=self._models)
                answers = answered(asking, identity)
            with only_run_in(folder / OWN, "output", wait=A_DAY):
                done = self._done(record, identity)  # another worker may have been here
                if done is None or again:
                    if isinstance(step, Ask | Converse):
                        found = asking.rows(answers)
                    elif isinstance(step, Verify):
                        verifying = Verifying(step=step, context=context, judge=self._judge(step), work=self.work)
                        found = verifying.rows(identity)
                    else:
                        found = plain.made(step, context)
                    record.unlink(missing_ok=True)
                    done = self._kept(found, context, file.path), _hash(file.path)
                    note(record, {"identity": identity, "counts": done[0].record(), "rows": done[1]})
        return file, done[1], done[0]

    def _kept(self, rows: Iterator[Row], context: Context, path: Path) -> Counts:
        with written(path) as write:
            for row in rows:
                write(row)
                context.counts.made += 1
        return context.counts

    def _done(self, record: Path, identity: str) -> tuple[Counts, str] | None:
        """What a finished step counted, and the digest of its rows; None if it is to be made, or made again."""
        held = noted(record)
        if held is None or held["identity"] != identity:
            return None
        return Counts.of(held["counts"]), str(held["rows"])

    def _judge(self, step: Verify) -> dict[str, Any] | None:
        """Settings of a step's judge."""
        if step.judge is None:
            return None
        place = self.places[step.judge]
        client = self.work.client
        given: dict[str, Any] = {"endpoint": place.endpoint, "model": self._models[step.judge]["model"]}
        given |= {"attempts": client.attempts, "attempt_seconds": client.attempt_seconds}
        given |= {"concurrency": client.concurrency} if client.concurrency else {}
        return given | ({"key_variable": place.key_variable} if place.key_variable else {})

    def _write(self, made: Mapping[str, tuple[RowFile, str, Counts]], read: Mapping[str, int]) -> None:
        last = list(made)[-1]
        files: dict[str, Counts] = {}
        for name, settings in self.recipe.outputs.items():
            rows = made[settings.of or last][0]
            context = Context(name=name, folder=self.folder, rows=rows, seed=self.given.seed)
            words = outputs.write(name, settings, context, self.folder / f"{name}.jsonl")
            context.counts.numbers["words"] = words
            files[name] = context.counts
        about = {
            "input": self.given.input,
            "license": self.given.license,
            "seed": self.given.seed,
            "nemo_ext": __version__,
            **read,
        }
        counts = {name: each[2] for name, each in made.items()}
        report.write(self.folder, self.recipe, about=about, models=self._models, steps=counts, outputs=files)
        said = ", ".join(f"{each.made:,} {self.recipe.outputs[name].kind}" for name, each in files.items())
        notice(f"done: {self.folder}: {said}; {self.folder / report.CARD}")


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_request(given: Settings, recipe: Recipe) -> tuple[str, Any] | None:
    """The first step that asks, and what it asks, as far as the steps before it can be done without others.

    Raises:
        ValueError: an expression fails, or there are no rows.
    """
    rows: RowFile = FirstRows(given.input, _TRIED)
    for name, step in recipe.steps.items():
        context = Context(name=name, folder=Path(), rows=rows, seed=given.seed)
        if isinstance(step, Ask):
            asking = Asking(step=step, context=context, clients={}, work=WorkSettings(), models={})
            for row in rows:
                if context.applies(step.when, row):
                    return name, asking.prompt_of(row)
            continue  # its answers change other rows than these
        if isinstance(step, Verify | Converse):
            return None
        made = FirstRows.__new__(FirstRows)
        made.rows = list(plain.made(step, context))
        rows = made
    return None


def _show(given: Settings, recipe: Recipe) -> None:
    """Prints the steps, and the first request."""
    for number, (name, step) in enumerate(recipe.steps.items(), start=1):
        print(f"{number}. {name}: {' '.join(filter(None, (step.kind, ', '.join(step.roles()))))}")
    if (found := _first_request(given, recipe)) is not None:
        print(f"\n{found[0]} asks:\n{found[1] if isinstance(found[1], str) else json.dumps(found[1], indent=1)}")
