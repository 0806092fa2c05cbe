"""The `nemo-ext curate` job: passes over raw documents in any number of shards, and a report on the funnel."""

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
"""Data config file that lists the output's streams, for `--config-dir=OUTPUT/conf data=curated`."""
SLURM = "slurm"
"""Folder for Slurm records, which `slurm.folder` may place inside the output."""


def check(config: Mapping[str, Any], *, files: bool = True) -> Plan:
    """Validate a composed config and return its settings, stages and sources.

    Args:
        config: composed config.
        files: whether to check files too (input, models and lists); False if an earlier job has yet to write them.

    Raises:
        ValueError: a setting is invalid, or a stage requires a file or library that is missing.
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
    """Return the record of settings and input; raises ValueError if the output folder belongs to anything else."""
    folder, now = plan.settings.folder, _made_of(plan)
    plan.settings.check_same(now)
    others = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if not plan.settings.record.exists() and set(others) - {plan.settings.own.name, SLURM}:
        raise ValueError(f"output={folder} has files that `nemo-ext curate` did not write: choose another folder")
    return now


def run(config: Mapping[str, Any]) -> None:
    """Do this shard's work on the curation that a composed config describes, resuming from existing files.

    Raises:
        ValueError: a setting, a file or the input is invalid, or the folder has output made with different settings.
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
        notice(f"{settings.folder} is already complete: see {(settings.folder / REPORT).with_suffix('.html')}")
        return
    as_json = json.dumps(config, default=str)
    mine, workers = settings.mine(units), settings.workers or usable_cores()
    size = sum(unit.size for unit in mine)
    for current in passes:
        work, label = Work(as_json, current.number), _label(current, passes)
        work.units.run(partial(run_unit, work), mine, workers=workers, label=f"{label}:", total=size)
        if left := [unit for unit in units if not work.units.is_done(unit)]:
            notice(
                f"{label}: shard {settings.shard} is done; {len(left)} of {len(units)} units are "
                "left to other shards: run any shard again when those are done"
            )
            return
        with settings.lock():
            if not current.number:
                _check_folder(plan)  # the input may have changed while it was read
            decide(work, units)
            if current.number:  # the files of the previous pass are no longer needed
                _remove(Work(as_json, current.number - 1), units)
    with settings.lock():
        if not (settings.folder / RESULTS).exists():
            _finish(plan, Work(as_json, passes[-1].number), units)


def _label(current: Pass, passes: Sequence[Pass]) -> str:
    """Return the name of a pass for progress and notices, such as `pass 1 of 2 (read to language, to same_text)`."""
    names = [*([current.begin] if current.begin else ["read"]), *current.names]
    more = "" if current.end is None else f", to {current.end}"
    return f"pass {current.number + 1} of {len(passes)} ({names[0]}{f' to {names[-1]}' if names[1:] else ''}{more})"


def _remove(work: Work, units: Sequence[Unit]) -> None:
    for unit in units:
        for ending in (SUFFIX, VALUES, ENDS, VERDICTS):
            work.units.file(unit.number, ending).unlink(missing_ok=True)


def _finish(plan: Plan, last: Work, units: Sequence[Unit]) -> None:
    """Write the funnel, the report and the data file, and print how much was kept; `last` is the last pass."""
    folder, passes = plan.settings.folder, passes_of(plan.stages)
    counts = {stream: Counts() for stream in plan.streams}
    for current in passes:
        for unit in units:
            counts[unit.stream].add(Work(last.config, current.number).counts(unit.number))
    for stream, stream_counts in counts.items():
        _check_sums(stream, stream_counts, list(plan.stages))
    for temporary in folder.rglob(".*.tmp"):  # from workers that were killed
        with suppress(OSError):
            temporary.unlink()
    _remove(last, units)
    write_text(folder / STREAMS, _data_file(plan, counts))
    about = {"preset": plan.settings.preset or "none", "stages": ", ".join(plan.stages), "passes": len(passes)}
    page = report.page(about, counts, list(plan.stages)).write(folder / REPORT, page=True)
    write_text(folder / RESULTS, json.dumps({name: each.as_json() for name, each in counts.items()}, indent=1) + "\n")
    first, kept = Amount(), Amount()
    for stream_counts in counts.values():
        first.add(stream_counts.stage(READ).kept)
        for written in stream_counts.written.values():
            kept.add(written)
    print(
        f"kept {kept.documents:,} of {first.documents:,} documents, {kept.bytes / 1e6:,.1f} of "
        f"{first.bytes / 1e6:,.1f} MB: {page}"
    )


def _check_sums(stream: str, counts: Counts, names: Sequence[str]) -> None:
    """Raise ValueError if a stream's documents are not all accounted for.

    Each of the stages `names` must have received all documents that the previous stage kept, and kept or dropped each
    of them; all documents that the last stage kept must have been written.
    """
    before = counts.stage(READ).kept
    for name in names:
        through = counts.stage(name)
        dropped = sum(reason.amount.documents for reason in through.dropped.values())
        if through.came.documents != before.documents or through.kept.documents + dropped != before.documents:
            raise ValueError(
                f"stream {stream!r}: stage {name!r} should have received {before.documents:,} documents, but counted "
                f"{through.came.documents:,}, kept {through.kept.documents:,} and dropped {dropped:,}: files in the "
                "output folder were changed; remove it and run again"
            )
        before = through.kept
    if (written := sum(amount.documents for amount in counts.written.values())) != before.documents:
        raise ValueError(
            f"stream {stream!r}: {before.documents:,} documents were kept, but {written:,} were written: remove the "
            "output folder and run again"
        )


def _data_file(plan: Plan, counts: Mapping[str, Counts]) -> str:
    """Return a data config (YAML) for training on the output; a stream's weight is its bytes times its bucket rate."""
    folder = plan.settings.folder.absolute()
    rated = (stage for stage in plan.stages.values() if isinstance(stage, Buckets) and stage.rate is not None)
    buckets = next(rated, None)
    streams: list[dict[str, Any]] = []
    for stream_counts in counts.values():
        for place, amount in stream_counts.written.items():
            rate = buckets.rates[int(place.rpartition("/")[2])] if buckets is not None else 1.0
            path = f"{folder / DOCUMENTS / place}/*{SUFFIX}"
            source = {"kind": "jsonl", "path": path, "deduplicate": False}
            streams.append({"name": place.replace("/", "."), "weight": round(amount.bytes * rate), "source": source})
    data = {"directory": str(folder / "tokens"), "streams": streams}
    heading = "# @package _global_\n# Output of `nemo-ext curate`; weights are bytes"
    heading += ", times the rates of the buckets.\n" if buckets is not None else ".\n"
    return heading + yaml.safe_dump({"data": data}, sort_keys=False)


def _made_of(plan: Plan) -> dict[str, Any]:
    """Return the settings and input that determine the output; shards, workers and memory do not affect it."""
    curate = dataclasses.asdict(plan.curate)
    del curate["memory"]
    curate["blocks"] = {name: curate["blocks"][name] for name in plan.stages}
    files = {}
    for name, stage in plan.stages.items():
        for path in stage.reads():
            status = path.stat()
            files[f"{name}: {path}"] = [status.st_size, status.st_mtime_ns]
    return {
        "curate": curate,
        "files": files,
        "streams": {name: source.identity() for name, source in plan.streams.items()},
    }
