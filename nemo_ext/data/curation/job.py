"""Job `nemo-ext curate`: passes over raw documents by any number of shards and workers, and the funnel of it all."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.data.curation import report
from nemo_ext.data.curation.documents import SUFFIX
from nemo_ext.data.curation.funnel import Amount, Counts
from nemo_ext.data.curation.passes import (
    DOCUMENTS,
    ENDS,
    READ,
    VALUES,
    VERDICTS,
    Pass,
    Work,
    decide,
    passes_of,
    run_unit,
    tokenizer_of,
    units_of,
)
from nemo_ext.data.curation.settings import Plan, read_plan
from nemo_ext.data.curation.stages.buckets import Buckets
from nemo_ext.data.text.documents import Unit
from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import note
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import REPORT
from nemo_ext.job.workers import usable_cores

RESULTS = "funnel.json"
STREAMS = Path("conf", "data", "curated.yaml")
"""The streams as a data file, for `--config-dir=OUTPUT/conf data=curated`."""
SLURM = "slurm"
"""Folder of the record of a job's starts, which `slurm.folder` may put into the output."""


def check(config: Mapping[str, Any], *, files: bool = True) -> Plan:
    """Settings, stages and sources of a composed config, whose input need not be there yet.

    Args:
        config: composed config.
        files: whether what stages need, such as models and lists, must be there.

    Raises:
        ValueError: a setting is wrong, or a file or library that a stage needs is missing.
    """
    plan = read_plan(config)
    if not files:
        return plan
    for name, stage in plan.stages.items():
        try:
            stage.check()
        except ValueError as error:
            raise ValueError(f"curate.blocks.{name}: {error}") from error
    for name, source in plan.streams.items():
        try:
            source.check()
        except ValueError as error:
            raise ValueError(f"stream {name!r}: {error}") from error
    tokenizer_of(plan.curate)
    _check_folder(plan)
    return plan


def _check_folder(plan: Plan) -> dict[str, Any]:
    """Settings and input of the output; raises ValueError if its folder has something else in it."""
    folder, now = plan.settings.folder, _made_of(plan)
    plan.settings.check_same(now)
    others = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if not plan.settings.record.exists() and set(others) - {plan.settings.own.name, SLURM}:
        raise ValueError(f"output={folder}: has files that were not made here: choose another folder")
    return now


def run(config: Mapping[str, Any]) -> None:
    """Curate what the composed config describes, as far as this shard can, going on with what is there.

    Raises:
        ValueError: a setting, a file or the input is at fault, or the folder has the output of other settings.
        JobFailed: a worker process died.
    """
    plan = check(config)
    with plan.settings.lock():
        note(plan.settings.record, _check_folder(plan))
        units = units_of(plan)
    with plan.settings.claim():
        _run(config, plan, units)


def _run(config: Mapping[str, Any], plan: Plan, units: Sequence[Unit]) -> None:
    settings, passes = plan.settings, passes_of(plan.stages)
    if (settings.folder / RESULTS).exists():
        notice(f"{settings.folder}: is there already: {(settings.folder / REPORT).with_suffix('.html')}")
        return
    as_json = json.dumps(config, default=str)
    for each in passes:
        work = Work(as_json, each.number)
        _run_pass(plan, each, work, units)
        if left := [unit for unit in units if not work.units.is_done(unit)]:
            notice(
                f"{_named(each, passes)}: shard {settings.shard} is done; {len(left)} of {len(units)} units belong to "
                "others: when these are done, run any shard again"
            )
            return
        with settings.lock():
            if not each.number:
                _check_folder(plan)  # the input may have changed while it was read
            decide(work, units)
            if each.number:  # what the pass before made is needed no more
                _remove(Work(as_json, each.number - 1), units)
    with settings.lock():
        if not (settings.folder / RESULTS).exists():
            _finish(plan, Work(as_json, passes[-1].number), units)


def _run_pass(plan: Plan, this: Pass, work: Work, units: Sequence[Unit]) -> None:
    mine, workers = plan.settings.mine(units), plan.settings.workers or usable_cores()
    label, total = f"{_named(this, passes_of(plan.stages))}:", sum(unit.size for unit in mine)
    work.units.run(partial(run_unit, work), mine, workers=workers, label=label, total=total)


def _named(this: Pass, passes: Sequence[Pass]) -> str:
    names = [*([this.begin] if this.begin else ["read"]), *this.names]
    more = "" if this.end is None else f", to {this.end}"
    return f"pass {this.number + 1} of {len(passes)} ({names[0]}{f' to {names[-1]}' if names[1:] else ''}{more})"


def _remove(work: Work, units: Sequence[Unit]) -> None:
    for unit in units:
        for ending in (SUFFIX, VALUES, ENDS, VERDICTS):
            work.units.file(unit.number, ending).unlink(missing_ok=True)


def _finish(plan: Plan, last: Work, units: Sequence[Unit]) -> None:
    """Write the funnel, the report and the data file, and say what is left."""
    folder, passes = plan.settings.folder, passes_of(plan.stages)
    counts = {stream: Counts() for stream in plan.streams}
    for each in passes:
        for unit in units:
            counts[unit.stream].add(Work(last.config, each.number).counts(unit.number))
    for stream, own in counts.items():
        _check_sums(stream, own, list(plan.stages))
    for left in folder.rglob(".*.tmp"):  # of workers that were killed
        with suppress(OSError):
            left.unlink()
    _remove(last, units)
    write_text(folder / STREAMS, _data_file(plan, counts))
    about = {"preset": plan.settings.preset or "none", "stages": ", ".join(plan.stages), "passes": len(passes)}
    page = report.page(about, counts, list(plan.stages)).write(folder / REPORT, page=True)
    write_text(folder / RESULTS, json.dumps({name: own.as_json() for name, own in counts.items()}, indent=1) + "\n")
    first, kept = Amount(), Amount()
    for own in counts.values():
        first.add(own.of(READ).kept)
        for written in own.written.values():
            kept.add(written)
    print(
        f"{kept.documents:,} of {first.documents:,} documents are left, {kept.bytes / 1e6:,.1f} of "
        f"{first.bytes / 1e6:,.1f} MB: {page}"
    )


def _check_sums(stream: str, counts: Counts, names: Sequence[str]) -> None:
    """Raises ValueError if documents came or went between two stages without being counted."""
    before = counts.of(READ).kept
    for name in names:
        through = counts.of(name)
        left = sum(reason.amount.documents for reason in through.dropped.values())
        if through.came.documents != before.documents or through.kept.documents + left != before.documents:
            raise ValueError(
                f"stream {stream!r}: {before.documents:,} documents come to {name!r}, which counted "
                f"{through.came.documents:,}, kept {through.kept.documents:,} and dropped {left:,}: files of the "
                "folder were changed; remove it and run again"
            )
        before = through.kept
    if (written := sum(amount.documents for amount in counts.written.values())) != before.documents:
        raise ValueError(f"stream {stream!r}: {before.documents:,} documents were kept, but {written:,} written")


def _data_file(plan: Plan, counts: Mapping[str, Counts]) -> str:
    """The output's streams, weighted by their bytes and their buckets' rates, as a file of `hydra_conf/data`."""
    folder = plan.settings.folder.absolute()
    made = (stage for stage in plan.stages.values() if isinstance(stage, Buckets) and stage.rate is not None)
    buckets = next(made, None)
    streams: list[dict[str, Any]] = []
    for own in counts.values():
        for place, amount in own.written.items():
            rate = buckets.rates()[int(place.rpartition("/")[2])] if buckets is not None else 1.0
            path = f"{folder / DOCUMENTS / place}/*{SUFFIX}"
            source = {"kind": "jsonl", "path": path, "deduplicate": False}
            streams.append({"name": place.replace("/", "."), "weight": round(amount.bytes * rate), "source": source})
    data = {"directory": str(folder / "tokens"), "streams": streams}
    heading = "# @package _global_\n# What `nemo-ext curate` wrote; weights are bytes"
    heading += ", times the rates of the buckets.\n" if buckets is not None else ".\n"
    return heading + yaml.safe_dump({"data": data}, sort_keys=False)


def _made_of(plan: Plan) -> dict[str, Any]:
    """What the output depends on: not on shards, workers or memory."""
    curate = dataclasses.asdict(plan.curate)
    del curate["memory"]
    curate["blocks"] = {name: curate["blocks"][name] for name in plan.stages}
    files = {}
    for name, stage in plan.stages.items():
        for path in stage.reads():
            status = path.stat()
            files[f"{name}: {path}"] = [status.st_size, status.st_mtime_ns]
    streams = {
        name: {**source.describe(), "files": source.fingerprint(source.inputs())}
        for name, source in plan.streams.items()
    }
    found: dict[str, Any] = json.loads(json.dumps({"curate": curate, "files": files, "streams": streams}, default=str))
    return found
