"""The `nemo-ext curate` job: passes over raw documents in any number of shards, and a report on the funnel."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nemo_ext.data.curation.passes import Pass, Work, check_read, decide, passes_of, run_unit, tokenizer_of, units_of
from nemo_ext.data.curation.results import RESULTS, finish, remove
from nemo_ext.data.curation.settings import Plan, read_plan
from nemo_ext.data.text.documents import Unit
from nemo_ext.job.made_of import note
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import REPORT
from nemo_ext.job.settings import prefixed_errors
from nemo_ext.job.workers import usable_cores

SLURM = "slurm"
"""Folder for Slurm records, which `slurm.folder` may place inside the output."""


def check(config: Mapping[str, Any], *, files: bool = True) -> Plan:
    """Validate a composed config and return its settings, stages and sources.

    Args:
        files: whether to check files too (input, models and lists); False if an earlier job has yet to write them.

    Raises:
        ValueError: a setting is invalid, or a stage requires a file or library that is missing.
    """
    plan = read_plan(config)
    if not files:
        return plan
    for name, stage in plan.stages.items():
        with prefixed_errors(f"curate.blocks.{name}"):
            stage.check()
    for name, source in plan.streams.items():
        with prefixed_errors(f"stream {name!r}"):
            source.check()
    tokenizer_of(plan.curate)
    if plan.settings.engine == "datatrove":
        from nemo_ext.data.curation import pipelines

        pipelines.check(plan)
    _check_folder(plan)
    return plan


def _check_folder(plan: Plan) -> dict[str, Any]:
    """Return the settings and input to record; raises ValueError if the output folder has other files or settings."""
    folder, now = plan.settings.folder, plan.made_of()
    plan.settings.check_same(now)
    others = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if not plan.settings.record.exists() and set(others) - {plan.settings.own.name, SLURM}:
        raise ValueError(f"output={folder} has files that `nemo-ext curate` did not write: choose another folder")
    return now


def run(config: Mapping[str, Any]) -> None:
    """Do this shard's work on the curation that a composed config describes, resuming from existing files.

    With `engine=datatrove`, datatrove's executors divide the work instead. With `dry_run`, only list the work.

    Raises:
        ValueError: a setting, a file or the input is invalid, or the folder has output made with different settings.
        JobFailed: a worker process died, or a task of datatrove failed.
    """
    plan = check(config)
    settings = plan.settings
    for name, missing in plan.skipped.items():
        notice(f"stage {name} is skipped: to run it, set {missing} in curate.blocks.{name}")
    if settings.dry_run:
        _show(plan, json.dumps(config, default=str))
        return
    with settings.lock():
        note(settings.record, _check_folder(plan))
        units = units_of(plan)
    with settings.claim():
        if (settings.folder / RESULTS).exists():
            notice(f"{settings.folder} is already complete: see {(settings.folder / REPORT).with_suffix('.html')}")
        elif settings.engine == "datatrove":
            from nemo_ext.data.curation import pipelines

            pipelines.run(plan, json.dumps(config, default=str), units)
        else:
            _run(config, plan, units)


def _show(plan: Plan, as_json: str) -> None:
    units, passes = units_of(plan, store=False), passes_of(plan.stages)
    if plan.settings.engine == "datatrove":
        from nemo_ext.data.curation import pipelines

        for executor in pipelines.executors(plan, as_json, units):
            print(pipelines.shown(executor))
        return
    for current in passes:
        print(f"{_label(current, passes)}: {len(units)} units")


def _run(config: Mapping[str, Any], plan: Plan, units: Sequence[Unit]) -> None:
    settings, passes = plan.settings, passes_of(plan.stages)
    as_json = json.dumps(config, default=str)
    mine, workers = settings.mine(units), settings.workers or usable_cores()
    size = sum(unit.size for unit in mine)
    for current in passes:
        work, label = Work(as_json, current.number), _label(current, passes)
        work.units.run(partial(run_unit, work), mine, workers=workers, label=f"{label}:", total=size)
        if left := [unit for unit in units if not work.units.is_done(unit)]:
            notice(
                f"{label}: shard {settings.shard} is done, but other shards have not finished {len(left)} of "
                f"{len(units)} units of the input (curate.unit); run any shard again when they have"
            )
            return
        with settings.lock():
            check_read(work, units)
            decide(work, units)
            if current.number:  # the files of the previous pass are no longer needed
                remove(Work(as_json, current.number - 1), units)
    with settings.lock():
        if not (settings.folder / RESULTS).exists():
            finish(plan, Work(as_json, passes[-1].number), units)


def _label(current: Pass, passes: Sequence[Pass]) -> str:
    """Return the name of a pass for progress and notices, such as `pass 1 of 2 (read to language, to same_text)`."""
    names = [*([current.begin] if current.begin else ["read"]), *current.names]
    more = "" if current.end is None else f", to {current.end}"
    return f"pass {current.number + 1} of {len(passes)} ({names[0]}{f' to {names[-1]}' if names[1:] else ''}{more})"
