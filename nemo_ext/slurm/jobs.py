"""A job of `nemo-ext` on Slurm: its record of starts, its tasks, and the checkpoints that a run keeps. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.architecture.cost import total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.retention import Retention
from nemo_ext.job.job import Job, at, invoke
from nemo_ext.job.registry import job as find
from nemo_ext.job.registry import jobs
from nemo_ext.job.settings import nearest
from nemo_ext.slurm.settings import Settings

SHARDS = "shards"
"""Folder below a record with those of an array's tasks."""
RECORDS = Path("runs/slurm")
"""Folder for the records of jobs that have no run directory."""


def submitted(name: str) -> Job:
    """The job of a name, which can be submitted.

    Raises:
        ValueError: there is no such job for Slurm.
    """
    known = [job.name for job in jobs() if job.script]
    if name not in known:
        raise ValueError(f"job={name}: {nearest(name, known)}")
    return find(name)


def makes(name: str, config: Mapping[str, Any]) -> list[Path]:
    """Folders, files and file prefixes that the job writes."""
    return [Path(str(place)).expanduser() for place in find(name).outputs(config) if place]


def record_of(name: str, config: Mapping[str, Any], settings: Settings) -> Path:
    """Folder whose `slurm` holds the record of the job's starts: the run directory if there is one.

    Raises:
        ValueError: if the run directory is null.
    """
    job = find(name)
    if job.array is not None and (number := at(config, job.array.key)) is not None:
        section, _, key = job.array.key.rpartition(".")
        whole = {section: {**config[section], key: None}} if section else {key: None}
        return shard_record(record_of(name, {**config, **whole}, settings), int(str(number).partition("/")[0]))
    if settings.slurm.folder is not None:
        return Path(settings.slurm.folder).expanduser()
    if "run_dir" not in config:
        places = [Path(str(place)) for place in job.record(config) if place] if job.record else makes(name, config)
        # The whole path, as many folders have the same name.
        return RECORDS / "-".join([name, *(part for place in places for part in place.parts if part != "/")])
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    return Path(str(config["run_dir"]))


def tasks_of(name: str, config: Mapping[str, Any], settings: Settings) -> int:
    """Number of array tasks that do a job, or end it, together."""
    array = find(name).array
    return 1 if array is None else array.tasks(config, settings.slurm.shards)


def rounds_of(name: str, config: Mapping[str, Any], settings: Settings) -> int:
    """Number of arrays, one after the other, that do a job.

    Raises:
        ValueError: a setting of the job is wrong.
    """
    array = find(name).array
    return 1 if array is None or settings.slurm.shards == 1 else int(invoke(array.rounds, config))


def shard_record(record: Path, number: int) -> Path:
    """Folder like `record_of` for one task of an array that does a job together."""
    return record / SHARDS / str(number)


def nodes_and_gpus(name: str, config: Mapping[str, Any], settings: Settings) -> tuple[int, int]:
    """Number of nodes that a job takes, and number of GPUs on each.

    Raises:
        ValueError: if the job takes whole nodes, and the site's nodes are unknown.
    """
    nodes, gpus = invoke(find(name).size, config, settings)
    return nodes, gpus


CHECKPOINT_BYTES = 14
"""Bytes of a parameter in a checkpoint of a training: bf16 weights, fp32 weights and Adam's two states."""


def checkpoints_of(config: Mapping[str, Any]) -> tuple[int, float]:
    """Number of checkpoints that a training's retention keeps, and the bytes of each.

    One more than it keeps is written before another is removed.
    """
    flags, retention = config["megatron"], Retention.from_config(config)
    steps, interval = int(flags["train_iters"]), flags.get("save_interval")
    count = -(-steps // int(interval)) if interval else 1
    if retention.last is not None:
        count = min(count, retention.last + 1 + (steps // retention.every if retention.every else 0))
    return count, float(CHECKPOINT_BYTES) * total_params(Architecture.from_config(config))


def saved_step(name: str, record: Path) -> int | None:
    """Step of the newest checkpoint, 0 if there is none; None for jobs without steps."""
    function = find(name).saved_step
    return None if function is None else function(record)
