"""`nemo-ext submit pipeline=NAME`: a pipeline of jobs, each started after those it depends on have succeeded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from pydantic.dataclasses import dataclass as checked_dataclass
from rich.console import Console

from nemo_ext.job.config import check_choice, compose, config_folders, hydra_value
from nemo_ext.job.files import write_text
from nemo_ext.job.settings import STRICT, checked, nearest
from nemo_ext.slurm import attempts
from nemo_ext.slurm.jobs import MEANWHILE, ON_TRAINING_CONFIG, makes, script_name
from nemo_ext.slurm.preflight import Finding, errors, other_tokenizers
from nemo_ext.slurm.rehearse import REHEARSALS
from nemo_ext.slurm.settings import split
from nemo_ext.slurm.status import PARENTS, PIPELINE, job_of, queued
from nemo_ext.slurm.submit import Submission, hand_over, planned, tell
from nemo_ext.slurm.submit import checked as checked_submission

OWN_FOLDER = ("train", "rl", *MEANWHILE)
"""Jobs whose run directory is the folder of their stage."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Given:
    """A stage as written in a pipeline's file; see hydra_conf/pipeline.yaml."""

    job: str
    words: tuple[str, ...]
    after: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A job of a pipeline: its name and folder, its arguments of `nemo-ext submit`, and the stages that it follows."""

    name: str
    words: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages in topological order, without those skipped, and the folder that has one folder for each."""

    run_dir: Path
    stages: tuple[Stage, ...]
    config: Mapping[str, Any]

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
    all stages; the others are the pipeline's own.

    Raises:
        ValueError: naming what is wrong with a stage or an argument.
    """
    site, theirs = split(words)
    folders, theirs = config_folders(theirs)
    both = [f"--config-dir={folder}" for folder in folders]
    dotted = [word for word in theirs if "." in word.partition("=")[0]]
    own = [*both, *(word for word in theirs if word not in dotted)]
    check_choice("pipeline", own)
    config = compose("pipeline", own)
    given = {name: checked(Given, stage, where=f"stages.{name}") for name, stage in config["stages"].items()}
    for word in dotted:
        name = word.partition(".")[0]
        known = [*given, *dict.fromkeys(stage.job for stage in given.values())]
        if name not in known:
            raise ValueError(f"{word}: no stage or job of that name: {nearest(name, known)}")
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    for word in site:
        if word.startswith(("job=", "slurm.shards=", "slurm.folder=")):
            raise ValueError(f"{word}: is of one stage: write STAGE.{word}")
    if unknown := [name for name in config["skip"] if name not in given]:
        raise ValueError(f"skip={unknown[0]}: {nearest(unknown[0], given)}")
    run_dir, stages, above = Path(str(config["run_dir"])), list[Stage](), list[str]()
    for name, stage in given.items():
        script_name(stage.job)
        after = stage.after if stage.after is not None else tuple(above[-1:])
        if wrong := [parent for parent in after if parent not in above]:
            raise ValueError(f"stages.{name}.after={wrong[0]}: no stage above it has that name")
        above.append(name)
        if name in config["skip"]:
            continue
        above_all = (f"{stage.job}.", f"{name}.")
        more = [word.removeprefix(place) for place in above_all for word in dotted if word.startswith(place)]
        # The folder for the record of its starts.
        key = "run_dir" if stage.job in OWN_FOLDER else "slurm.folder"
        place = f"{key}={hydra_value(str(run_dir / name))}"
        wanted = tuple(parent for parent in after if parent not in config["skip"])
        every = [*both, f"job={stage.job}", place, *stage.words, *site, *more]
        stages.append(Stage(name=name, words=tuple(_last_of_each_key(every)), after=wanted))
    return Pipeline(run_dir=run_dir, stages=tuple(stages), config=config)


def _last_of_each_key(words: Sequence[str]) -> list[str]:
    """The last argument of each key, in the place of the first; all config folders are kept."""
    return list({word if word.startswith("-") else word.partition("=")[0]: word for word in words}.values())


def submit(words: Sequence[str], *, dry_run: bool) -> int:
    """Check all stages, then submit those neither finished nor in the queue; returns the exit code.

    Raises:
        ValueError: for mistakes that the user can correct.
    """
    console = Console(highlight=False, soft_wrap=True)
    pipeline = read(words)
    submissions: dict[str, Submission] = {}
    jobs: dict[str, str] = {}  # job ids of stages that wait or run; "" for stages to submit
    queue = queued()
    wrong = False
    for stage in pipeline.stages:
        coming = [
            place
            for parent in pipeline.before(stage)
            for config in submissions[parent.name].configs
            for place in makes(submissions[parent.name].settings.job, config)
        ]
        try:
            submission = submissions[stage.name] = planned(stage.words, coming=coming)
        except (ValueError, HydraException) as error:
            raise ValueError(f"stages.{stage.name}: {error}") from error
        # A stage is repeated if one that it depends on is.
        done = _finished(submission) and not _needed(stage, jobs)
        waiting = [job for record in submission.records if (job := job_of(record)) in queue]
        if done:
            console.print(f"{stage.name}: finished before", markup=False)
        elif waiting and queue[waiting[0]].startswith("completing"):
            raise ValueError(f"{stage.name}: job {waiting[0]} is just ending: give the command again in a minute")
        elif waiting:
            jobs[stage.name] = waiting[0].partition("_")[0]
            console.print(f"{stage.name}: job {waiting[0]} is {queue[waiting[0]]}", markup=False)
        else:
            jobs[stage.name] = ""
            found = [
                *checked_submission(submission, kept=pipeline.run_dir / attempts.FOLDER / REHEARSALS),
                *_other_tokenizers(pipeline.before(stage), submissions, submission),
            ]
            console.print(f"{stage.name}:", style="bold", markup=False)
            tell(console, replace(submission, after=tuple(f"<{name}>" for name in _needed(stage, jobs))), found)
            wrong = wrong or errors(found)
    if wrong:
        console.print("not submitted: mend the errors first")
        return 2
    if dry_run:
        console.print("not submitted: --dry-run")
        return 0
    write_text(pipeline.run_dir / PIPELINE, yaml.safe_dump(dict(pipeline.config), sort_keys=False, width=120))
    for stage in pipeline.stages:
        if jobs.get(stage.name) != "":
            continue
        needed = _needed(stage, jobs)
        submission = replace(submissions[stage.name], after=tuple(jobs[name] for name in needed))
        parents = [str(record.resolve()) for name in needed for record in submissions[name].records]
        for record in submission.records:
            write_text(record / attempts.FOLDER / PARENTS, "".join(f"{parent}\n" for parent in parents))
        jobs[stage.name] = hand_over(submission)
        console.print(f"{stage.name}: job {jobs[stage.name]}", markup=False)
    console.print(f"`nemo-ext status {pipeline.run_dir}` shows how they get on", markup=False)
    return 0


def _other_tokenizers(
    before: Sequence[Stage], submissions: Mapping[str, Submission], submission: Submission
) -> list[Finding]:
    """Errors for streams that earlier stages tokenise with another tokenizer than this stage uses."""
    if submission.settings.job not in ON_TRAINING_CONFIG:
        return []
    parents = [submissions[stage.name] for stage in before]
    made = [config for each in parents if each.settings.job == "tokenize" for config in each.configs]
    return [one for config in submission.configs for one in other_tokenizers(config, made)]


def _needed(stage: Stage, jobs: Mapping[str, str]) -> list[str]:
    """Names of the stages that a stage has to wait for."""
    return [name for name in stage.after if name in jobs]


def _finished(submission: Submission) -> bool:
    """True if all of a submission was finished before, with the same arguments; ValueError if with others."""
    ends = [attempts.finished(record) for record in submission.records]
    if any(end is None for end in ends):
        return False
    own = split(submission.words)[1]
    if len(ends) == 1 and set(ends[0] or ()) != set(own):
        changed = sorted(set(ends[0] or ()) ^ set(own))
        raise ValueError(
            f"{submission.base}: finished with other words ({', '.join(changed)}): keep them, choose another run_dir, "
            f"or remove {submission.base / attempts.FOLDER / attempts.FINISHED} to have it done again, and what follows"
        )
    return True
