"""Parsing of a pipeline's file and the command's arguments into stages (jobs with arguments) in run order."""

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
_RESERVED = ("slurm", "compare")
"""Stage names that are not allowed, as a pipeline's folder contains other folders with these names."""
EVALUATION = "evaluate_"
"""Prefix of the names of stages that evaluate another stage's model."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class StageConfig:
    """A stage as written in a pipeline's file (hydra_conf/pipeline.yaml describes the keys)."""

    job: str
    words: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    after: tuple[str, ...] | None = None
    parent: str | None = None
    beside: tuple[str, ...] = ()
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One job of a pipeline, with its arguments and dependencies.

    Attributes:
        name: name of the stage, and of its folder in the run directory.
        words: arguments for `nemo-ext submit`, including those about site and queue.
        after: names of the stages on which it depends directly.
        parent: name of the stage whose model it starts from; None if there is none.
        beside: names of the server stages that run at the same time.
        paper: section of the paper that it follows, and the results reported there.
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
        """True for a job that serves a model and runs until it is interrupted."""
        return find(self.job).server

    @property
    def own(self) -> list[str]:
        """Arguments for `nemo-ext JOB`, without those about site and queue."""
        return split(self.words)[1]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline's stages in topological order.

    Attributes:
        run_dir: folder with a folder per stage.
        stages: selected stages.
        every: all stages of the file, selected or not.
        config: composed config of the pipeline.
    """

    run_dir: Path
    stages: tuple[Stage, ...]
    every: tuple[Stage, ...]
    config: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The composed config as YAML, with all stages in topological order."""
        configs = self.config["stages"]
        added = {stage.name: {"job": stage.job, "parent": stage.parent} for stage in self.every}
        stages = {name: configs.get(name, entry) for name, entry in added.items()}
        return yaml.safe_dump({**self.config, "stages": stages}, sort_keys=False, width=120)

    def before(self, stage: Stage) -> list[Stage]:
        """List all direct and indirect dependencies of a stage."""
        by_name = {other.name: other for other in self.stages}
        dependencies: dict[str, Stage] = {}
        for name in stage.after:
            dependencies |= {other.name: other for other in [*self.before(by_name[name]), by_name[name]]}
        return list(dependencies.values())


def read(words: Sequence[str]) -> Pipeline:
    """Parse the command's arguments into a pipeline.

    `STAGE.key=value` goes to one stage, `JOB.key=value` to all stages of that job, and the arguments for the site and
    queue to all stages; other arguments are the pipeline's own keys. Stages keep the file's order unless dependencies
    require a different one.

    Raises:
        ValueError: a stage or an argument is invalid.
    """
    site, other_words = split(words)
    folders, other_words = config_folders(other_words)
    config_dirs = [f"--config-dir={folder}" for folder in folders]
    dotted = [word for word in other_words if "." in word.partition("=")[0]]
    if not any(word.startswith("pipeline=") for word in other_words):
        raise ValueError(
            "pipeline is missing: set it to the name of a file in hydra_conf/pipeline, such as pipeline=quickstart"
        )
    pipeline_words = _in_scale([word for word in other_words if word not in dotted], folders)
    check_choice("pipeline", [*config_dirs, *pipeline_words])
    config = compose("pipeline", [*config_dirs, *pipeline_words])
    stage_configs = _in_order(_with_evaluations(_stages(config), strings(config["evaluate"])))
    for word in dotted:
        name = word.partition(".")[0]
        known = [*stage_configs, *dict.fromkeys(stage.job for stage in stage_configs.values())]
        if name not in known:
            raise ValueError(f"{word}: no stage or job is called {name}: {nearest(name, known)}")
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: set it to a directory, such as runs/mine")
    check_place("run_dir", config["run_dir"])
    for word in site:
        if word.startswith(("job=", "slurm.shards=", "slurm.folder=")):
            raise ValueError(f"{word} can only be set for a single stage: write STAGE.{word}")
    run_dir, every = Path(str(config["run_dir"])), dict[str, Stage]()
    for name, stage in stage_configs.items():
        job = submitted(stage.job)
        above_all = (f"{stage.job}.", f"{name}.")
        more = [word.removeprefix(place) for place in above_all for word in dotted if word.startswith(place)]
        # The folder that records the starts of the stage.
        key = "run_dir" if job.own_folder else "slurm.folder"
        place = f"{key}={hydra_value(str(run_dir / name))}"
        start = [] if stage.parent is None else [_handed_over(name, stage.job, every[stage.parent], run_dir)]
        if job.server:
            start.append("port=0")  # the default port may be in use
        if name.startswith(EVALUATION) and stage.parent is not None:
            start.append(f"run_dir={hydra_value(str(run_dir / name))}")
        all_words = [*config_dirs, f"job={stage.job}", place, *start, *stage.words, *stage.more, *site, *more]
        # The last value of a repeated key, at the first one's position; all config folders.
        words_of_stage = list({w if w.startswith("-") else w.partition("=")[0]: w for w in all_words}.values())
        if any(word in words_of_stage for word in (f"to={run_dir / name}", f"to={hydra_value(str(run_dir / name))}")):
            raise ValueError(
                f"stages.{name}: to={run_dir / name} is where the stage's starts are recorded; choose another folder, "
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
    wanted = _wanted(stage_configs, config)
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
    """Replace `pipeline=PIPELINE` and `scale=NAME` with `pipeline=NAME/PIPELINE`, the pipeline's variant of that scale.

    The words are arguments of the pipeline; `scale=null` is only removed.
    """
    values = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    scale, name = values.get("scale", "null"), values.get("pipeline", "")
    words = [word for word in words if not word.startswith("scale=")]  # Hydra would read it as a config group
    if scale == "null":
        return words
    places = group_folders("pipeline", folders)
    if name and not any((place / scale / f"{name}.yaml").is_file() for place in places):
        known = sorted({f"{file.stem} with scale={file.parent.name}" for at in places for file in at.glob("*/*.yaml")})
        raise ValueError(f"scale={scale}: pipeline={name} has no variant of that scale; available: {', '.join(known)}")
    return [f"pipeline={scale}/{name}" if word.startswith("pipeline=") else word for word in words]


def _stages(config: Mapping[str, Any]) -> dict[str, StageConfig]:
    """Parse a file's stages and fill in `after`, by default the nearest stage above that is not a server.

    A stage also comes after its parent and after the stages that make its servers' models.
    """
    for name in config["stages"]:
        if not _NAME.fullmatch(str(name)) or name in _RESERVED:
            raise ValueError(
                f"stages.{name}: a stage's name must start with a letter, have only letters, digits, _ and -, and not "
                f"be {' or '.join(_RESERVED)}"
            )
    stages = {name: checked(StageConfig, stage, where=f"stages.{name}") for name, stage in config["stages"].items()}
    jobs_that_end = [name for name, stage in stages.items() if not submitted(stage.job).server]
    names = list(stages)
    for number, (name, stage) in enumerate(stages.items()):
        above = [each for each in names[:number] if each in jobs_that_end]
        after = stage.after if stage.after is not None else tuple(above[-1:])
        if wrong := [key for key in (*after, *filter(None, [stage.parent])) if key not in jobs_that_end]:
            key = "parent" if wrong[0] == stage.parent and wrong[0] not in after else "after"
            if wrong[0] in stages:
                raise ValueError(
                    f"stages.{name}.{key}={wrong[0]}: a server does not end; name it in `beside` of {name} instead"
                )
            raise ValueError(f"stages.{name}.{key}={wrong[0]}: no such stage: {nearest(wrong[0], stages)}")
        if wrong := [key for key in stage.beside if key not in stages or key in jobs_that_end]:
            servers = [each for each in stages if each not in jobs_that_end]
            raise ValueError(
                f"stages.{name}.beside={wrong[0]}: no such stage with `job: serve`: {nearest(wrong[0], servers)}"
            )
        parents = [] if stage.parent is None or stage.parent in after else [stage.parent]
        stages[name] = replace(stage, after=(*after, *parents))
    for name, stage in stages.items():  # if the served model changes, the stage runs again
        models = [each for server in stage.beside for each in stages[server].after or ()]
        stages[name] = replace(stage, after=tuple(dict.fromkeys([*(stage.after or ()), *models])))
    first_user = {server: stage for stage in reversed(stages.values()) for server in stage.beside}
    for server, stage in first_user.items():  # a server starts when the first stage that uses it can
        follows = dict.fromkeys([*(stages[server].after or ()), *(stage.after or ())])
        stages[server] = replace(stages[server], after=tuple(follows))
    return stages


def _with_evaluations(stages: Mapping[str, StageConfig], words: Sequence[str]) -> dict[str, StageConfig]:
    """Add an evaluation with the arguments `words` after each stage that trains a model; none if `words` is empty."""
    evaluated = dict[str, StageConfig]()
    for name, stage in stages.items():
        evaluated[name] = stage
        if words and find(stage.job).model.trained:
            evaluated[f"{EVALUATION}{name}"] = StageConfig(
                job="evaluate", words=tuple(words), after=(name,), parent=name
            )
    return evaluated


def _in_order(stages: Mapping[str, StageConfig]) -> dict[str, StageConfig]:
    """Sort the stages topologically, as close to the given order as possible."""
    ordered, remaining = dict[str, StageConfig](), dict(stages)
    while remaining:
        ready = next(
            (name for name, stage in remaining.items() if not {*(stage.after or ()), *stage.beside} & remaining.keys()),
            None,
        )
        if ready is None:
            raise ValueError(
                f"stages: {', '.join(remaining)} wait for each other; change the `after`, `parent` or `beside` of one"
            )
        ordered[ready] = remaining.pop(ready)
    return ordered


def _wanted(stages: Mapping[str, StageConfig], config: Mapping[str, Any]) -> list[str]:
    """Select the stages between the config's `from` and `to` that are not in `skip`, and return their names in order.

    The evaluation of the last stage and the servers that the stages use are included, unless skipped.
    """
    names = list(stages)
    skip, first, last = strings(config["skip"]), config["from"], config["to"]
    # `skip` may name an evaluation that does not exist (`evaluate=null`).
    named = [name for name in skip if name.removeprefix(EVALUATION) not in names]
    for key, name in [*(("skip", each) for each in named), ("from", first), ("to", last)]:
        if name is not None and name not in names:
            raise ValueError(f"{key}={name}: no such stage: {nearest(str(name), names)}")
    begin = 0 if first is None else names.index(first)
    end = len(names) if last is None else names.index(last) + 1
    if names[end : end + 1] == [f"{EVALUATION}{last}"]:
        end += 1
    left_out = {*skip, *(EVALUATION + name for name in skip)}
    wanted = [name for name in names[begin:end] if name not in left_out]
    if not wanted:
        raise ValueError(
            f"from={first}, to={last} and skip select no stage; change them, as the order is {', '.join(names)}"
        )
    servers = {server for name in wanted for server in stages[name].beside} - set(skip)
    return [name for name in names if name in wanted or name in servers]


def _handed_over(name: str, job: str, parent: Stage, run_dir: Path) -> str:
    """Return the argument that makes a stage's job start from its parent's model."""
    where = f"stages.{name}.parent={parent.name}"
    model, source = find(job).model, find(parent.job).model
    if not model.key:
        raise ValueError(f"{where}: {job} does not start from a model; replace `parent` with `after`")
    words = {word.partition("=")[0]: word.partition("=")[2].strip("\"'") for word in parent.words}
    folder = source.place(run_dir / parent.name, words) if source.leaves else None
    if folder is None:
        raise ValueError(f"{where}: {parent.job} does not write a model; name a stage that does")
    if source.leaves == "run" and model.takes == "checkpoints":
        folder /= CHECKPOINTS
    if source.leaves in ("run", "megatron") and model.takes == "hugging_face":
        raise ValueError(f"{where}: {job} needs a Hugging Face folder; add a stage with `job: convert` between them")
    return f"{model.key}={hydra_value(str(folder))}"


def finished(base: Path, records: Iterable[Path], arguments: Sequence[str]) -> bool:
    """Return whether a stage, including all tasks of an array, has finished with these arguments.

    Args:
        base: the stage's folder, for messages.
        records: folders whose `slurm` folder holds the record of starts.

    Raises:
        ValueError: it finished with other arguments.
    """
    ends = [attempts.finished(record) for record in records]
    if any(end is None for end in ends):
        return False
    changed = attempts.other_words(ends[0] or (), arguments)
    if len(ends) == 1 and changed:
        raise ValueError(
            f"{base} was finished with other arguments ({', '.join(changed)}); use the same ones, choose another "
            f"run_dir, or remove {base / attempts.FOLDER / attempts.FINISHED} to run it and the stages after it again"
        )
    return True


def coming(configs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Path]:
    """List the paths that jobs will write, given each job's name and composed config."""
    return [place for job, config in configs for place in makes(job, config)]
