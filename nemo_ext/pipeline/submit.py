"""Submits a pipeline's stages as dependent jobs on Slurm (`nemo-ext submit pipeline=NAME`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from rich.console import Console

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.job.files import write_text
from nemo_ext.job.findings import Finding, errors
from nemo_ext.job.registry import job as find
from nemo_ext.job.settings import prefixed_errors
from nemo_ext.pipeline.needs import needs_of
from nemo_ext.pipeline.run import runs_here
from nemo_ext.pipeline.stages import Pipeline, Stage, coming, finished, read
from nemo_ext.slurm import attempts, beside
from nemo_ext.slurm.jobs import makes
from nemo_ext.slurm.preflight import other_tokenizers
from nemo_ext.slurm.rehearse import REHEARSALS
from nemo_ext.slurm.settings import split
from nemo_ext.slurm.status import PARENTS, PIPELINE, queued, queued_job
from nemo_ext.slurm.submit import Submission, by_hand, hand_over, planned, tell, variable
from nemo_ext.slurm.submit import checked as checked_submission


def submit(words: Sequence[str], *, dry_run: bool) -> int:
    """Check all stages, submit those neither finished nor in the queue, and return the exit code.

    Raises:
        ValueError: an argument, the pipeline's file or a stage is invalid.
    """
    console = Console(highlight=False, soft_wrap=True)
    pipeline = read(words)
    if runs_here(pipeline.run_dir):
        raise ValueError(
            f"{pipeline.run_dir}: `nemo-ext pipeline` is running in this folder; wait for it, or end it with Ctrl-C"
        )
    submissions: dict[str, Submission] = {}
    jobs: dict[str, str] = {}  # job ids of queued and running stages; "" for stages to submit
    stages_by_finding, wrong = dict[Finding, list[str]](), False  # stages by finding
    try:
        queue = queued()
    except ValueError as error:  # a dry run is also useful without Slurm
        if not dry_run:
            raise
        queue, wrong = {}, True
        stages_by_finding[Finding("error", str(error))] = ["the queue"]
    for stage in sorted(pipeline.stages, key=lambda stage: stage.server):  # a server is queued only for its clients
        earlier = [
            (parent.job, config) for parent in pipeline.before(stage) for config in submissions[parent.name].configs
        ]
        try:
            submission = submissions[stage.name] = planned(stage.words, coming=coming(earlier))
        except (ValueError, HydraException) as error:
            raise ValueError(f"stages.{stage.name}: {error}") from error
        # A stage runs again if one of its dependencies does.
        done = (
            not stage.server
            and finished(submission.base, submission.records, split(submission.words)[1])
            and not _needed(stage, jobs)
        )
        waiting = [job for record in submission.records if (job := queued_job(record, queue))]
        users = _users(stage, pipeline)
        if done or (users and not any(jobs.get(name) == "" for name in users)):
            console.print(
                f"{stage.name}: {'finished before' if done else 'not needed, as no stage that uses it is queued'}",
                markup=False,
            )
        elif waiting and queue[waiting[0]].startswith("completing"):
            raise ValueError(
                f"stages.{stage.name}: job {waiting[0]} is about to end; run the command again in a minute"
            )
        elif waiting:
            jobs[stage.name] = waiting[0].partition("_")[0]
            console.print(f"{stage.name}: job {waiting[0]} is {queue[waiting[0]]}", markup=False)
        else:
            jobs[stage.name] = ""
            with prefixed_errors(f"stages.{stage.name}: the model that it starts from is invalid"):
                model_config = model_to_come(submission, [submissions[each.name] for each in pipeline.before(stage)])
            submission = submissions[stage.name] = replace(submission, model_to_come=model_config)
            problems = [
                *checked_submission(submission, kept=pipeline.run_dir / attempts.FOLDER / REHEARSALS),
                # Errors of an earlier stage would be repeated.
                *([] if wrong else _other_tokenizers(pipeline.before(stage), submissions, submission)),
            ]
            for finding in problems:
                stages_by_finding.setdefault(finding, []).append(stage.name)
            wrong = wrong or errors(problems)
            console.print(f"{stage.name}: checked", markup=False)
    names = [stage.name for stage in pipeline.stages]
    if coming_up := {name: submissions[name] for name in names if jobs.get(name) == ""}:
        wide = Console(highlight=False, width=None if console.is_terminal else 200)  # a file or a pipe has room
        wide.print(needs_of(coming_up))
    shown = {name: job or variable(name) for name, job in jobs.items()}
    for stage in pipeline.stages:
        following = _following(submissions[stage.name], stage, shown)
        for line in by_hand(following, stage.name) if stage.name in coming_up else ():
            console.print(line, markup=False)
    for kind in ("note", "warning", "error"):
        of_kind = [(finding, stages) for finding, stages in stages_by_finding.items() if finding.kind == kind]
        tell(console, [replace(finding, text=f"{finding.text} ({', '.join(stages)})") for finding, stages in of_kind])
    if wrong:
        console.print("not submitted: fix the errors first")
        return 2
    if dry_run:
        console.print("not submitted: --dry-run")
        return 0
    write_text(pipeline.run_dir / PIPELINE, pipeline.text)
    for stage in pipeline.stages:
        if jobs.get(stage.name) != "":
            continue
        needed = _needed(stage, jobs)
        submission = _following(submissions[stage.name], stage, jobs)
        _note_servers(stage, submissions, pipeline, jobs)
        parents = [str(record.resolve()) for name in needed for record in submissions[name].records]
        for record in submission.records:
            write_text(record / attempts.FOLDER / PARENTS, "".join(f"{parent}\n" for parent in parents))
        jobs[stage.name] = hand_over(submission)
        console.print(f"{stage.name}: job {jobs[stage.name]}", markup=False)
    console.print(f"`nemo-ext status {pipeline.run_dir}` shows their progress", markup=False)
    return 0


def _other_tokenizers(
    before: Sequence[Stage], submissions: Mapping[str, Submission], submission: Submission
) -> list[Finding]:
    """Return errors for streams that an earlier stage tokenises with a tokenizer other than this stage's."""
    if not find(submission.settings.job).training:
        return []
    parents = [submissions[stage.name] for stage in before]
    made = [config for each in parents if each.settings.job == "tokenize" for config in each.configs]
    return [one for config in submission.configs for one in other_tokenizers(config, made)]


def model_to_come(submission: Submission, before: Sequence[Submission]) -> Mapping[str, Any] | None:
    """Derive the config.json of an RL policy that does not exist yet from the training that will make it.

    Returns:
        The config; None for other jobs, for a policy that exists, and for one whose sizes are not known yet.

    Raises:
        ValueError: no Hugging Face format can express the model.
    """
    job, config = submission.settings.job, submission.config
    if not find(job).ray(config) or Path(str(config["policy"])).expanduser().exists():
        return None
    for _ in before:
        places = [read.path.resolve() for read in find(job).inputs(config) if read.model]
        makers = [
            maker
            for maker in before
            for made in makes(maker.settings.job, maker.config)
            if any(place.is_relative_to(made.resolve()) for place in places)
        ]
        if not makers:
            return None
        job, config = makers[0].settings.job, makers[0].config
        if find(job).ranks == "slurm":
            return None if config["train"].get("model_of_start") else choose(from_config(config))[1]
        if not find(job).model.same_sizes:
            return None
    return None


def _users(server: Stage, pipeline: Pipeline) -> list[str]:
    """List the names of the stages that use a server, in order; empty if the stage is not a server."""
    return [stage.name for stage in pipeline.stages if server.name in stage.beside]


def _following(submission: Submission, stage: Stage, jobs: Mapping[str, str]) -> Submission:
    """Return the submission with the ids of the jobs that it waits for, and of its servers' jobs.

    `jobs` maps each stage that is or will be in the queue to its job id or, for printed commands, to a shell variable.
    """
    after, beside = _needed(stage, jobs), [name for name in stage.beside if name in jobs]
    return replace(submission, after=tuple(jobs[name] for name in after), beside=tuple(jobs[name] for name in beside))


def _note_servers(
    stage: Stage, submissions: Mapping[str, Submission], pipeline: Pipeline, jobs: Mapping[str, str]
) -> None:
    """Record a stage's servers and, if the stage is itself a server, the stages that use it, in its launch records."""
    servers = {jobs[name]: str((pipeline.run_dir / name).resolve()) for name in stage.beside if name in jobs}
    asking = [record for name in _users(stage, pipeline) for record in submissions[name].records]
    for record in submissions[stage.name].records:
        beside.note_servers(record, servers)
        if stage.server:
            beside.note_asking(record, asking)


def _needed(stage: Stage, jobs: Mapping[str, str]) -> list[str]:
    """Return the names of the stage's dependencies that are in the queue or are about to be, as listed in `jobs`."""
    return [name for name in stage.after if name in jobs]
