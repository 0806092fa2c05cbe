"""What Slurm needs to know about jobs: record folder, array tasks, nodes, checkpoint sizes. Does not import torch."""

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
"""Subfolder of a record folder for the records of an array's tasks."""
RECORDS = Path("runs/slurm")
"""Folder for the records of jobs without a run directory."""


def submitted(name: str) -> Job:
    """Look up a job that can be submitted to Slurm; raises ValueError if no such job can be submitted."""
    known = [job.name for job in jobs() if job.script]
    if name not in known:
        raise ValueError(f"job={name} cannot be submitted: {nearest(name, known)}")
    return find(name)


def makes(name: str, config: Mapping[str, Any]) -> list[Path]:
    """Return the folders, files and path prefixes that the job `name` writes with this config."""
    return [Path(str(place)).expanduser() for place in find(name).outputs(config) if place]


def record_of(name: str, config: Mapping[str, Any], settings: Settings) -> Path:
    """Record folder of a job, whose subfolder `slurm` records its starts; this is the run directory if the job has one.

    Raises:
        ValueError: the run directory is null.
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
        # The whole path, as folder names are not unique.
        return RECORDS / "-".join([name, *(part for place in places for part in place.parts if part != "/")])
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: set it to a directory, such as runs/mine")
    return Path(str(config["run_dir"]))


def tasks_of(name: str, config: Mapping[str, Any], settings: Settings) -> int:
    """Number of tasks in a job's array, or in the last one if there are several; 1 without an array."""
    array = find(name).array
    return 1 if array is None else array.tasks(config, settings.slurm.shards)


def rounds_of(name: str, config: Mapping[str, Any], settings: Settings) -> int:
    """Number of consecutive arrays that a job needs; 1 without an array.

    Raises:
        ValueError: a setting of the job is invalid.
    """
    array = find(name).array
    return 1 if array is None or settings.slurm.shards == 1 else int(invoke(array.rounds, config))


def shard_record(record: Path, number: int) -> Path:
    """Record folder of one task of an array, given the record folder of the whole job."""
    return record / SHARDS / str(number)


def nodes_and_gpus(name: str, config: Mapping[str, Any], settings: Settings) -> tuple[int, int]:
    """Number of nodes that a job uses, and number of GPUs on each of them.

    Raises:
        ValueError: the job uses whole nodes, but the site's number of GPUs per node is unknown.
    """
    size: tuple[int, int] = invoke(find(name).size, config, settings)
    return size


CHECKPOINT_BYTES = 14
"""Bytes per parameter in a training checkpoint, for bf16 weights, fp32 weights and Adam's two states."""


def checkpoints_of(config: Mapping[str, Any]) -> tuple[int, float]:
    """Maximum number of checkpoints that a training run keeps, and the size of each in bytes.

    The number includes the new checkpoint that is written before an old one is removed.
    """
    flags, retention = config["megatron"], Retention.from_config(config)
    steps, interval = int(flags["train_iters"]), flags.get("save_interval")
    count = -(-steps // int(interval)) if interval else 1
    if retention.last is not None:
        count = min(count, retention.last + 1 + (steps // retention.every if retention.every else 0))
    return count, float(CHECKPOINT_BYTES) * total_params(Architecture.from_config(config))


def saved_step(name: str, record: Path) -> int | None:
    """Step of the newest checkpoint in a job's record folder; 0 if there is none, None for jobs without steps."""
    function = find(name).saved_step
    return None if function is None else function(record)
