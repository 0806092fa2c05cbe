"""A pipeline's file and the command's arguments as stages: jobs with their words, in the order they run in."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.job.config import check_choice, check_place, compose, config_folders, group_folders, hydra_value
from nemo_ext.job.registry import job as find
from nemo_ext.job.run_directory import CHECKPOINTS
from nemo_ext.job.settings import STRICT, checked, nearest, strings
from nemo_ext.slurm import attempts
from nemo_ext.slurm.jobs import makes, submitted
from nemo_ext.slurm.settings import split

_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_TAKEN = ("slurm", "compare")
"""Names of other folders in a pipeline's folder."""
EVALUATION = "evaluate_"
"""Beginning of the names of stages that evaluate another."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Given:
    """A stage as written in a pipeline's file; see hydra_conf/pipeline.yaml."""

    job: str
    words: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    after: tuple[str, ...] | None = None
    parent: str | None = None
    beside: tuple[str, ...] = ()
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A job of a pipeline.

    Attributes:
        name: name of the stage, and of its folder.
        job: the job.
        words: arguments of `nemo-ext submit`: about site and queue, and the job's own.
        after: stages that it follows directly.
        parent: stage from whose model it starts.
        beside: stages that serve a model while it runs.
        paper: section of the paper, and what it reports.
    """

    name: str
    job: str
    words: tuple[str, ...]
    after: tuple[str, ...]
    parent: str | None = None
    beside: tuple[str, ...] = ()
    paper: str = ""

    @property
    def server(self) -> bool:
        """True if it ends only when it is interrupted: it serves while others ask it, or is a pipeline's last stage."""
        return find(self.job).server

    @property
    def own(self) -> list[str]:
        """Arguments of `nemo-ext JOB`."""
        return split(self.words)[1]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline's stages in topological order.

    Attributes:
        run_dir: folder that has one folder for each stage.
        stages: those to run.
        every: these and those left out.
        config: composed config of the pipeline.
    """

    run_dir: Path
    stages: tuple[Stage, ...]
    every: tuple[Stage, ...]
    config: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The composed config as YAML, with all stages in their order."""
        given = self.config["stages"]
        added = {stage.name: {"job": stage.job, "parent": stage.parent} for stage in self.every}
        stages = {name: given.get(name, entry) for name, entry in added.items()}
        return yaml.safe_dump({**self.config, "stages": stages}, sort_keys=False, width=120)

    def before(self, stage: Stage) -> list[Stage]:
        """All direct and indirect dependencies of a stage."""
        named = {each.name: each for each in self.stages}
        found: dict[str, Stage] = {}
        for name in stage.after:
            found |= {each.name: each for each in [*self.before(named[name]), named[name]]}
        return list(found.values())


def read(words: Sequence[str]) -> Pipeline:
    """The pipeline that the command's arguments describe.

    `STAGE.key=value` goes to one stage, `JOB.key=value` to all stages of that job, arguments about site and queue to
    all stages; the others are the pipeline's own. Stages stand as in the file, but none before those that it follows.

    Raises:
        ValueError: naming what is wrong with a stage or an argument.
    """
    site, theirs = split(words)
    folders, theirs = config_folders(theirs)
    both = [f"--config-dir={folder}" for folder in folders]
    dotted = [word for word in theirs if "." in word.partition("=")[0]]
    if not any(word.startswith("pipeline=") for word in theirs):
        raise ValueError("pipeline=NAME is missing: a file of hydra_conf/pipeline, such as pipeline=quickstart")
    own = _in_scale([word for word in theirs if word not in dotted], folders)
    check_choice("pipeline", [*both, *own])
    config = compose("pipeline", [*both, *own])
    given = _in_order(_with_evaluations(_stages(config), strings(config["evaluate"])))
    for word in dotted:
        name = word.partition(".")[0]
        known = [*given, *dict.fromkeys(stage.job for stage in given.values())]
        if name not in known:
            raise ValueError(f"{word}: no stage or job of that name: {nearest(name, known)}")
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    check_place("run_dir", config["run_dir"])
    for word in site:
        if word.startswith(("job=", "slurm.shards=", "slurm.folder=")):
            raise ValueError(f"{word}: is of one stage: write STAGE.{word}")
    run_dir, every = Path(str(config["run_dir"])), dict[str, Stage]()
    for name, stage in given.items():
        job = submitted(stage.job)
        above_all = (f"{stage.job}.", f"{name}.")
        more = [word.removeprefix(place) for place in above_all for word in dotted if word.startswith(place)]
        # The folder for the record of its starts.
        key = "run_dir" if job.own_folder else "slurm.folder"
        place = f"{key}={hydra_value(str(run_dir / name))}"
        start = [] if stage.parent is None else [_handed_over(name, stage.job, every[stage.parent], run_dir)]
        if job.server:
            start.append("port=0")  # others may have the default one
        if name.startswith(EVALUATION) and stage.parent is not None:
            start.append(f"run_dir={hydra_value(str(run_dir / name))}")
        all_words = [*both, f"job={stage.job}", place, *start, *stage.words, *stage.more, *site, *more]
        words_of_stage = _last_of_each_key(all_words)
        if any(word in words_of_stage for word in (f"to={run_dir / name}", f"to={hydra_value(str(run_dir / name))}")):
            raise ValueError(
                f"stages.{name}: to={run_dir / name} has the record of the stage's starts: choose another folder, "
                f"such as to=${{run_dir}}/{name}_model"
            )
        every[name] = Stage(
            name=name,
            job=stage.job,
            words=tuple(words_of_stage),
            after=tuple(stage.after or ()),
            parent=stage.parent,
            beside=stage.beside,
            paper=stage.paper,
        )
    wanted = _wanted(given, config)
    stages = [
        replace(
            stage,
            after=tuple(parent for parent in stage.after if parent in wanted),
            beside=tuple(server for server in stage.beside if server in wanted),
        )
        for name, stage in every.items()
        if name in wanted
    ]
    return Pipeline(run_dir=run_dir, stages=tuple(stages), every=tuple(every.values()), config=config)


def _in_scale(words: list[str], folders: Sequence[Path]) -> list[str]:
    """The pipeline's own words, with the file of its twin for `scale=NAME`: hydra_conf/pipeline/NAME/PIPELINE.yaml."""
    values = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    scale, name = values.get("scale", "null"), values.get("pipeline", "")
    words = [word for word in words if not word.startswith("scale=")]  # to Hydra it is a group
    if scale == "null":
        return words
    places = group_folders("pipeline", folders)
    if name and not any((place / scale / f"{name}.yaml").is_file() for place in places):
        known = sorted({f"{file.stem} with scale={file.parent.name}" for at in places for file in at.glob("*/*.yaml")})
        raise ValueError(f"scale={scale}: pipeline={name} has no such twin; there are: {', '.join(known)}")
    return [f"pipeline={scale}/{name}" if word.startswith("pipeline=") else word for word in words]


def _stages(config: Mapping[str, Any]) -> dict[str, Given]:
    """The stages of a file; `after` is filled in: the stage above that ends by itself, the parent, a server's model.

    Raises:
        ValueError: a stage follows one that does not exist, or one that never ends; or what serves it does not.
    """
    for name in config["stages"]:
        if not _NAME.fullmatch(str(name)) or name in _TAKEN:
            raise ValueError(
                f"stages.{name}: name it by letters, digits, _ and -, a letter first, and not {' or '.join(_TAKEN)}"
            )
    given = {name: checked(Given, stage, where=f"stages.{name}") for name, stage in config["stages"].items()}
    ending = [name for name, stage in given.items() if not submitted(stage.job).server]
    names = list(given)
    for number, (name, stage) in enumerate(given.items()):
        above = [each for each in names[:number] if each in ending]
        after = stage.after if stage.after is not None else tuple(above[-1:])
        if wrong := [key for key in (*after, *filter(None, [stage.parent])) if key not in ending]:
            key = "parent" if wrong[0] == stage.parent and wrong[0] not in after else "after"
            never = f"is a server, which never ends: name it in `beside` of {name}"
            raise ValueError(
                f"stages.{name}.{key}={wrong[0]}: {never if wrong[0] in given else nearest(wrong[0], given)}"
            )
        if wrong := [key for key in stage.beside if key not in given or key in ending]:
            servers = [each for each in given if each not in ending]
            raise ValueError(f"stages.{name}.beside={wrong[0]}: no stage with job: serve: {nearest(wrong[0], servers)}")
        parents = [] if stage.parent is None or stage.parent in after else [stage.parent]
        given[name] = replace(stage, after=(*after, *parents))
    for name, stage in given.items():  # what is asked another model is done again
        models = [each for server in stage.beside for each in given[server].after or ()]
        given[name] = replace(stage, after=tuple(dict.fromkeys([*(stage.after or ()), *models])))
    first = {server: stage for stage in reversed(given.values()) for server in stage.beside}
    for server, stage in first.items():  # it is started when the first stage that asks it can be
        follows = dict.fromkeys([*(given[server].after or ()), *(stage.after or ())])
        given[server] = replace(given[server], after=tuple(follows))
    return given


def _with_evaluations(given: Mapping[str, Given], words: Sequence[str]) -> dict[str, Given]:
    """The stages, and where there are words for it an evaluation after each that makes a model."""
    found = dict[str, Given]()
    for name, stage in given.items():
        found[name] = stage
        if words and find(stage.job).model.trained:
            found[f"{EVALUATION}{name}"] = Given(job="evaluate", words=tuple(words), after=(name,), parent=name)
    return found


def _in_order(given: Mapping[str, Given]) -> dict[str, Given]:
    """The stages, as far as possible in the order given.

    Raises:
        ValueError: stages wait for each other.
    """
    found, left = dict[str, Given](), dict(given)
    while left:
        ready = next(
            (name for name, stage in left.items() if not {*(stage.after or ()), *stage.beside} & left.keys()), None
        )
        if ready is None:
            raise ValueError(f"stages: {', '.join(left)} wait for each other: mend `after` or `parent` of one")
        found[ready] = left.pop(ready)
    return found


def _wanted(given: Mapping[str, Given], config: Mapping[str, Any]) -> list[str]:
    """Names of the stages from `from` to `to` that `skip` does not name, with what evaluates the last and serves them.

    Raises:
        ValueError: there is no stage of a name, or none is left.
    """
    names = list(given)
    skip, first, last = strings(config["skip"]), config["from"], config["to"]
    # A pipeline may leave out an evaluation, also where a user wants none (`evaluate=null`).
    named = [name for name in skip if name.removeprefix(EVALUATION) not in names]
    for key, name in [*(("skip", each) for each in named), ("from", first), ("to", last)]:
        if name is not None and name not in names:
            raise ValueError(f"{key}={name}: {nearest(str(name), names)}")
    begin = 0 if first is None else names.index(first)
    end = len(names) if last is None else names.index(last) + 1
    if names[end : end + 1] == [f"{EVALUATION}{last}"]:
        end += 1
    left_out = {*skip, *(EVALUATION + name for name in skip)}
    wanted = [name for name in names[begin:end] if name not in left_out]
    if not wanted:
        raise ValueError(f"no stage is left between from={first} and to={last}: the order is {', '.join(names)}")
    servers = {server for name in wanted for server in given[name].beside} - set(skip)
    return [name for name in names if name in wanted or name in servers]


def _handed_over(name: str, job: str, parent: Stage, run_dir: Path) -> str:
    """The word by which a stage's job starts from the model that its parent makes.

    Raises:
        ValueError: the parent makes no model, the job takes none, or it takes another kind of model.
    """
    where = f"stages.{name}.parent={parent.name}"
    model, source = find(job).model, find(parent.job).model
    if not model.key:
        raise ValueError(f"{where}: {job} starts from no model: take `parent` away, or write `after`")
    words = {word.partition("=")[0]: word.partition("=")[2].strip("\"'") for word in parent.words}
    folder = source.place(run_dir / parent.name, words) if source.leaves else None
    if folder is None:
        raise ValueError(f"{where}: {parent.job} makes no model: name the stage that does")
    if source.leaves == "run" and model.takes == "checkpoints":
        folder /= CHECKPOINTS
    if source.leaves in ("run", "megatron") and model.takes == "hugging_face":
        raise ValueError(f"{where}: {job} takes a Hugging Face folder: put a stage with job: convert between them")
    return f"{model.key}={hydra_value(str(folder))}"


def _last_of_each_key(words: Sequence[str]) -> list[str]:
    """The last argument of each key, in the place of the first; all config folders are kept."""
    return list({word if word.startswith("-") else word.partition("=")[0]: word for word in words}.values())


def finished(base: Path, records: Iterable[Path], own: Sequence[str]) -> bool:
    """True if all of a stage was finished before, with the same arguments; ValueError if with others.

    Args:
        base: folder of the stage, for messages.
        records: folders whose `slurm` holds the record of starts.
        own: arguments of the job.
    """
    ends = [attempts.finished(record) for record in records]
    if any(end is None for end in ends):
        return False
    changed = attempts.other_words(ends[0] or (), own)
    if len(ends) == 1 and changed:
        raise ValueError(
            f"{base}: finished with other words ({', '.join(changed)}): keep them, choose another run_dir, "
            f"or remove {base / attempts.FOLDER / attempts.FINISHED} to have it done again, and what follows"
        )
    return True


def coming(configs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Path]:
    """Paths that jobs write, by job and composed config."""
    return [place for job, config in configs for place in makes(job, config)]
