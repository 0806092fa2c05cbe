"""The `nemo-ext synthesize` job: runs the steps of a recipe and writes its output files (docs/synthetic.md)."""

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext import __version__
from nemo_ext.endpoint.client import Client, EndpointGone
from nemo_ext.generate.work import TooManyDead
from nemo_ext.job.files import A_DAY, only_run_in
from nemo_ext.job.job import JobFailed
from nemo_ext.job.made_of import digest, note, noted
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import OWN
from nemo_ext.job.settings import check_keys, checked
from nemo_ext.rl.environments import make, settings_of
from nemo_ext.serving.meanwhile import endpoint_of
from nemo_ext.serving.model import check as check_model
from nemo_ext.serving.settings import ServingSettings
from nemo_ext.synthesis import outputs, plain, report
from nemo_ext.synthesis.asking import Asking
from nemo_ext.synthesis.canaries import Fooled
from nemo_ext.synthesis.context import Context, Counts
from nemo_ext.synthesis.rows import FirstRows, RowFile, files_of, read_first, read_input, written
from nemo_ext.synthesis.settings import Ask, Converse, Recipe, Role, Screen, Settings, Step, Verify, WorkSettings
from nemo_ext.synthesis.verifying import NoVerdicts, Verifying

_DONE, _ROWS, _STEPS = "done.json", "rows.jsonl", "steps"
_TRIED = 50


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext synthesize`; the same command resumes it.

    Raises:
        ValueError: a setting is invalid, the input cannot be read, or existing answers have different settings.
        JobFailed: no rows remain, too many answers failed, a judge is unreliable, or the endpoint does not respond.
        OSError: a file cannot be written.
    """
    settings, recipe, work = _checked(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C
    if work.dry_run:
        _show(settings, recipe)
        return
    folder = Path(settings.output).expanduser()
    try:
        with _places(config, settings, recipe, folder) as places:
            _Run(settings=settings, recipe=recipe, work=work, folder=folder, places=places).run()
    except (NoVerdicts, Fooled) as error:
        raise JobFailed(str(error)) from None
    except TooManyDead as error:
        raise JobFailed(
            f"synthesize.max_dead={work.max_dead:g} is exceeded in a step: {error}; see the reasons in "
            f"{folder}/steps/*/answers-*/dead, then fix the cause and set synthesize.retry_dead=true, or raise "
            "synthesize.max_dead"
        ) from None
    except EndpointGone as error:
        raise JobFailed(f"{error}; the same command resumes") from None


def check(config: Mapping[str, Any]) -> None:
    """Validate a config of `nemo-ext synthesize` before its first request; input that does not exist yet is skipped.

    Raises:
        ValueError: a setting is invalid, or an expression fails for the first rows of the input.
    """
    settings, recipe, _ = _checked(config)
    try:
        files = files_of(settings.input)
    except ValueError:
        files = []
    if files:
        _first_request(settings, recipe)


def _checked(config: Mapping[str, Any]) -> tuple[Settings, Recipe, WorkSettings]:
    settings = checked(Settings, config)
    recipe, work = Recipe.from_config(config), settings.synthesize
    if Path(settings.output).expanduser().is_file():
        raise ValueError(f"output={settings.output} is a file: set output to a folder")
    for name, step in recipe.steps.items():
        if isinstance(step, Screen):
            plain.screen_of(step, f"steps.{name}")
        if isinstance(step, Verify | Converse) and step.environment is not None:
            _check_environment(f"steps.{name}", step)
    for role in recipe.asked():
        place = recipe.place(role)
        if place.endpoint is None and settings.endpoint is None and settings.served is None:
            raise ValueError(
                f"roles.{role} has no endpoint: set roles.{role}.endpoint to a run directory of `nemo-ext serve` or a "
                "URL, or set endpoint for all roles, or set model to a model's folder"
            )
        variable = place.key_variable or (settings.key_variable if place.endpoint is None else None)
        if variable is not None and not os.environ.get(variable):
            raise ValueError(
                f"roles.{role}.key_variable: the environment variable {variable} is not set; set it to the API key"
            )
    if settings.endpoint is None and settings.served is not None:
        check_model(settings.served, ServingSettings.from_config(config), config)
    return settings, recipe, work


def _check_environment(where: str, step: Verify | Converse) -> None:
    try:
        known, settings = settings_of(str(step.environment)), dict(step.settings)
        judged = isinstance(step, Verify) and step.judge is not None
        if judged and "judge" not in known:
            raise ValueError(f"environment {step.environment} does not use a judge: remove judge")
        if known.get("judge") and not judged:
            raise ValueError(f"environment {step.environment} requires a judge: set judge to a role")
        check_keys(settings, tuple(known), required=(), where="settings")
        if not judged:
            environment = make(str(step.environment), settings)
            if (environment.begin is None) == isinstance(step, Converse):
                kind = "converse" if isinstance(step, Verify) else "verify"
                raise ValueError(f"environment={step.environment} requires a step with kind={kind}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


@contextmanager
def _places(config: Mapping[str, Any], settings: Settings, recipe: Recipe, folder: Path) -> Iterator[dict[str, Role]]:
    """Provide a mapping from each role that the recipe queries to its endpoint.

    Roles without an endpoint use the job's. If the config has a model folder instead, the model is served until the
    block ends.
    """
    roles = {role: recipe.place(role) for role in recipe.asked()}
    places = {name: role for name, role in roles.items() if role.endpoint is not None}
    if len(places) == len(roles):
        yield places
        return
    with endpoint_of(config, folder / OWN) as (endpoint, model, _):
        for name, role in roles.items():
            if name not in places:
                variable = role.key_variable or settings.key_variable
                places[name] = Role(endpoint=endpoint, model=role.model or model, key_variable=variable)
        yield places


@dataclass(kw_only=True)
class _Run:
    """Execution of a recipe.

    Attributes:
        settings, recipe, work: the job's settings.
        folder: output folder.
        places: mapping from role to its endpoint.
    """

    settings: Settings
    recipe: Recipe
    work: WorkSettings
    folder: Path
    places: Mapping[str, Role]
    _models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Run the unfinished steps, then write the output files."""
        asyncio.run(self._reach())
        rows, identity, read = self._input()
        finished: dict[str, tuple[RowFile, str, Counts]] = {}
        for number, (name, step) in enumerate(self.recipe.steps.items(), start=1):
            label = f"step {number} of {len(self.recipe.steps)}, {name}"
            rows, identity, counts = finished[name] = self._step(name, step, rows, identity, label)
            if not counts.made:
                dropped = "; ".join(
                    f"{count:,} {reason}, such as {counts.examples[reason][0]}"
                    for reason, count in counts.dropped.most_common(4)
                )
                why = dropped or f"the step makes none from its {counts.rows:,} input rows"
                raise JobFailed(
                    f"steps.{name}: no rows remain ({why}): correct the step or its input (details: "
                    f"{rows.path.parent / _DONE})"
                )
        with only_run_in(self.folder / OWN, "output", wait=A_DAY):
            self._write(finished, read)

    async def _reach(self) -> None:
        for role in self.recipe.asked():
            async with self._client(role) as client:
                await client.check()
                self._models[role] = {"model": client.address.model, "checkpoint": client.address.digest}

    def _client(self, role: str) -> Client:
        place = self.places[role]
        return Client(str(place.endpoint), self.work.client, model=place.model, key_variable=place.key_variable)

    def _input(self) -> tuple[RowFile, str, dict[str, int]]:
        """Return the input rows, the digest of their files, and the numbers of distinct and repeated rows."""
        folder = self.folder / OWN / "input"
        with only_run_in(folder, "output", wait=A_DAY):
            identity = digest([[name, _hash(path)] for name, path in files_of(self.settings.input)])
            record = folder / _DONE
            if (existing := noted(record) or {}).get("identity") != identity:
                record.unlink(missing_ok=True)
                rows, repeated = read_input(self.settings.input, folder / _ROWS)
                note(record, existing := {"identity": identity, "rows": rows, "repeated": repeated})
        return RowFile(folder / _ROWS), identity, {"rows": existing["rows"], "repeated": existing["repeated"]}

    def _step(self, name: str, step: Step, rows: RowFile, before: str, label: str) -> tuple[RowFile, str, Counts]:
        """Run a step unless it is finished.

        Args:
            name: name of the step.
            step: the step.
            rows: its input rows.
            before: digest of the input rows.
            label: description of the step for the log.

        Returns:
            The output rows, their digest, and the step's counts.
        """
        folder = self.folder / _STEPS / name
        canaries = {"canaries": self.work.canaries} if getattr(step, "canaries", None) is not None else {}
        models = {role: self._models[role] for role in step.roles()}
        settings = json.loads(json.dumps(asdict(step), default=str))
        reads = plain.screen_of(step, f"steps.{name}").reads() if isinstance(step, Screen) else []
        files = [_hash(path) for path in reads]
        identity = digest([name, step.kind, settings, models, files, self.settings.seed, canaries, before, __version__])
        record, file = folder / _DONE, RowFile(folder / _ROWS)
        done = self._done(record, identity)
        again = done is not None and self.work.retry_dead and bool(done[0].dropped.get("no answer"))
        if done is None or again:
            context = Context(name=name, folder=folder, rows=rows, seed=self.settings.seed)
            notice(f"{label}: {len(rows):,} rows")
            answers = None
            if isinstance(step, Ask | Converse):
                clients = {role: self._client(role) for role in step.roles()}
                asking = Asking(step=step, context=context, clients=clients, work=self.work, models=self._models)
                with only_run_in(folder / OWN, "output", wait=A_DAY):
                    asked = asking.prepare(identity)
                answers = None if asked is None else asyncio.run(asking.ask(asked))
            with only_run_in(folder / OWN, "output", wait=A_DAY):
                done = self._done(record, identity)  # another worker may have finished the step
                if done is None or again:
                    if isinstance(step, Ask | Converse):
                        new_rows = asking.rows(answers)
                    elif isinstance(step, Verify):
                        verifying = Verifying(step=step, context=context, judge=self._judge(step), work=self.work)
                        new_rows = verifying.rows(identity)
                    else:
                        new_rows = plain.run_step(step, context)
                    record.unlink(missing_ok=True)
                    with written(file.path) as write:
                        for row in new_rows:
                            write(row)
                            context.counts.made += 1
                    done = context.counts, _hash(file.path)
                    note(record, {"identity": identity, "counts": done[0].record(), "rows": done[1]})
        return file, done[1], done[0]

    def _done(self, record: Path, identity: str) -> tuple[Counts, str] | None:
        """Return a finished step's counts and the digest of its rows; None if the step must be run.

        Args:
            record: file that records the finished step.
            identity: digest of everything that the rows depend on; if the record has a different one, the step must be
                run.
        """
        existing = noted(record)
        if existing is None or existing["identity"] != identity:
            return None
        return Counts.from_record(existing["counts"]), str(existing["rows"])

    def _judge(self, step: Verify) -> dict[str, Any] | None:
        """Return the settings of a step's judge (`nemo_ext.rl.judge.JudgeSettings`); None if it has none."""
        if step.judge is None:
            return None
        place = self.places[step.judge]
        client = self.work.client
        judge: dict[str, Any] = {"endpoint": place.endpoint, "model": self._models[step.judge]["model"]}
        judge |= {"attempts": client.attempts, "attempt_seconds": client.attempt_seconds}
        judge |= {"concurrency": client.concurrency} if client.concurrency else {}
        return judge | ({"key_variable": place.key_variable} if place.key_variable else {})

    def _write(self, finished: Mapping[str, tuple[RowFile, str, Counts]], read: Mapping[str, int]) -> None:
        last = list(finished)[-1]
        files: dict[str, Counts] = {}
        for name, settings in self.recipe.outputs.items():
            rows = finished[settings.of or last][0]
            context = Context(name=name, folder=self.folder, rows=rows, seed=self.settings.seed)
            words = outputs.write(name, settings, context, self.folder / f"{name}.jsonl")
            context.counts.numbers["words"] = words
            files[name] = context.counts
        about = {
            "input": self.settings.input,
            "license": self.settings.license,
            "seed": self.settings.seed,
            "nemo_ext": __version__,
            **read,
        }
        counts = {name: step[2] for name, step in finished.items()}
        report.write(self.folder, self.recipe, about=about, models=self._models, steps=counts, outputs=files)
        written_files = ", ".join(f"{file.made:,} {self.recipe.outputs[name].kind}" for name, file in files.items())
        notice(f"done: {self.folder}: {written_files}; {self.folder / report.CARD}")


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_request(settings: Settings, recipe: Recipe) -> tuple[str, Any] | None:
    """Return step and prompt of the first request, built from the first input rows.

    Return None if no request can be built yet, because other answers or verdicts must come first.

    Raises:
        ValueError: an expression fails, or the input is empty.
    """
    rows: RowFile = FirstRows(read_first(settings.input, _TRIED))
    for name, step in recipe.steps.items():
        context = Context(name=name, folder=Path(), rows=rows, seed=settings.seed)
        if isinstance(step, Ask):
            asking = Asking(step=step, context=context, clients={}, work=WorkSettings(), models={})
            for row in rows:
                if context.applies(step.when, row):
                    return name, asking.prompt_of(row)
            continue  # the step applies to none of these rows
        if isinstance(step, Verify | Converse):
            return None
        rows = FirstRows(list(plain.run_step(step, context)))
    return None


def _show(settings: Settings, recipe: Recipe) -> None:
    """Print a recipe's steps and its first request."""
    for number, (name, step) in enumerate(recipe.steps.items(), start=1):
        print(f"{number}. {name}: {' '.join(filter(None, (step.kind, ', '.join(step.roles()))))}")
    if (request := _first_request(settings, recipe)) is not None:
        first_step, prompt = request
        print(
            f"\nfirst request of {first_step}:\n{prompt if isinstance(prompt, str) else json.dumps(prompt, indent=1)}"
        )
