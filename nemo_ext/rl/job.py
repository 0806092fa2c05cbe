"""The `nemo-ext rl` job: checks its settings and trains on the chosen engine."""

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.data.curriculum.layout import CURRICULUM, STATS
from nemo_ext.data.text.user_files import open_lines, parquet_file
from nemo_ext.job.files import only_run_in
from nemo_ext.job.made_of import describe, differing, flat
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import CHECKPOINTS, CONFIG, read_config
from nemo_ext.job.settings import checked
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient, Preference, algorithm_of, of_steps, presets
from nemo_ext.rl.environments import GYM
from nemo_ext.rl.plan import read_blend
from nemo_ext.rl.reprofile import Curricula
from nemo_ext.rl.settings import Settings, TrainTasks

SAME = (
    *("engine", "policy", "template", "tasks", "pairs", "environments", "rl", "trl", "nemo_rl"),
    *("precision_plan", "seed", "lora"),
)
"""Config keys that must not change when a run is resumed."""
STEPS = "rl.schedule.steps"
SAVE_BY = "NEMO_EXT_SAVE_BY"
"""Environment variable with the Unix time by which NeMo-RL, which handles no signals, must save and exit."""
OF_THE_MACHINE = (
    *("nemo_rl.set.cluster.", "nemo_rl.layout", "nemo_rl.gpu_memory_gib"),
    "nemo_rl.set.checkpointing.checkpoint_must_save_by",
)
"""Prefixes of keys that may change when a run is resumed on another machine, as may `concurrency` of environments."""
READS_AHEAD = "NeMo-RL's asynchronous loop reads prompts in another process, before the rewards they depend on exist"
ENGINES = {"trl": "nemo_ext.rl.trl.run", "nemo_rl": "nemo_ext.rl.nemo_rl.job"}


def run(config: Mapping[str, Any]) -> bool:
    """Start or resume a training run from the composed config.

    Returns:
        True if a signal arrived during the last step, although the run is finished.

    Raises:
        ValueError: a setting is invalid, or the engine is missing or cannot express a setting.
    """
    algorithm = checked_algorithm(config)
    check_steps(config, algorithm)
    if Path(config["policy"]).expanduser().is_dir():
        may_run_code(config["policy"], config)
    algorithm = over_own_pairs(config, algorithm)
    config = {**config, "tasks": planned_tasks(config, algorithm)}
    run_dir = Path(config["run_dir"])
    with only_run_in(run_dir):
        if any((run_dir / CHECKPOINTS).glob("*")):
            check_same_run(read_config(run_dir / CONFIG), config)
        return bool(import_module(ENGINES[config["engine"]]).run(config, algorithm))


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if a resumed run has changed settings, other than its number of steps.

    Args:
        before: config of the existing run.
        now: config to resume with.
    """
    old, new = ({key: config.get(key) for key in SAME} for config in (before, now))
    was, is_ = flat(old), flat(new)
    # Off, empty and absent mean the same to an engine.
    changed = {key: how for key, how in differing(old, new).items() if (was.get(key) or None) != (is_.get(key) or None)}
    # If the share of a file is bounded by epochs, more steps change the plan from the first step on.
    bounded = any(key.endswith("cap_epochs") for key in flat((now.get("tasks") or {}).get("train") or {}))
    refused = {
        key: change
        for key, change in changed.items()
        if not (key.startswith(OF_THE_MACHINE) or fnmatch(key, "rl.environments.*.concurrency"))
        and (bounded or key != STEPS)
    }
    if refused:
        raise ValueError(
            f"run_dir={now['run_dir']} was started with different settings ({describe(refused)}); restore them, or set "
            "another run_dir"
        )


def planned_tasks(config: Mapping[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """Return section `tasks` with defaults filled in: the run's seed and, for a directory without a blend, streams.

    There is one stream per environment of the algorithm, with the environment's weight.
    """
    tasks = dict(config["tasks"])
    if not isinstance(algorithm, PolicyGradient):
        return tasks
    train = tasks["train"]
    if not train.get("curriculum"):
        train = {"seed": config["seed"], **train}
    weights = {name: use.weight for name, use in algorithm.environments.items()}
    if train.get("directory") and not (train.get("blend") or train.get("streams")):
        train["streams"] = [{"name": name, "weight": weight} for name, weight in weights.items()]
    elif not train.get("directory") and len(set(weights.values())) > 1:
        notice("the weights of rl.environments are ignored: they apply to tasks.train.directory, not to a single file")
    return {**tasks, "train": train}


def over_own_pairs(config: Mapping[str, Any], algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with its epochs counted over the run's own pairs.

    Raises:
        ValueError: the pairs are missing or fewer than a batch.
    """
    schedule = algorithm.schedule
    if isinstance(algorithm, PolicyGradient) or schedule.steps is not None or not schedule.epochs:
        return algorithm
    path = Path(config["pairs"]["train"]).expanduser()
    if not path.is_file():
        raise ValueError(f"pairs.train={path}: no such file; write it with `nemo-ext preference_data`")
    count = _rows(path)
    if count < algorithm.batch:
        raise ValueError(
            f"pairs.train={path} has {count:,} pairs, fewer than rl.batch={algorithm.batch}; lower rl.batch to at most "
            f"{count}, or add pairs"
        )
    algorithm = replace(algorithm, schedule=replace(schedule, examples=count))
    notice(f"{schedule.epochs} epochs over {count:,} pairs: {algorithm.steps:,} steps")
    return algorithm


def check_steps(config: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Raise ValueError if the number of steps is not set; suggest one from the paper's epochs and the task count."""
    schedule = algorithm.schedule
    if algorithm.steps is not None or (isinstance(algorithm, Preference) and schedule.epochs):
        return
    advice = ""
    count = _task_count(config["tasks"]["train"], algorithm) if isinstance(algorithm, PolicyGradient) else None
    if count is not None:
        epochs, prompts = schedule.epochs or 1, algorithm.examples_per_step
        steps = max(1, epochs * count // prompts)
        length = f"the paper's {epochs} epoch{'s' * (epochs > 1)}" if schedule.epochs else "one epoch"
        advice = f"; {length} over {count:,} tasks with {prompts:,} per step is rl.schedule.steps={steps}"
    raise ValueError(
        f"rl.schedule.steps=null: set it, as the preset's source ({algorithm.source}) states no number of steps{advice}"
    )


def _task_count(train: Mapping[str, Any], algorithm: PolicyGradient) -> int | None:
    """Return the number of training tasks; None if a file does not exist yet because an earlier job writes it."""
    if train.get("path"):
        files = [Path(str(train["path"]))]
    elif train.get("curriculum"):
        files = [Path(str(train["curriculum"])) / CURRICULUM]
    elif train.get("directory") and (train.get("blend") or train.get("streams")):
        tree = read_blend({key: train[key] for key in ("directory", "blend", "streams") if key in train})
        files = [Path(f"{leaf.prefix}.jsonl") for leaf in tree.leaves()]
    else:
        files = [Path(str(train.get("directory"))) / f"{name}.jsonl" for name in algorithm.environments]
    files = [path.expanduser() for path in files]
    return sum(map(_rows, files)) if files and all(path.is_file() for path in files) else None


def _rows(path: Path) -> int:
    """Return the number of rows in a Parquet file, or of non-blank lines in a text file."""
    if path.suffix == ".parquet":
        return int(parquet_file(path).metadata.num_rows)
    with open_lines(str(path)) as file:
        return sum(1 for line in file if not line.isspace())


def checked_algorithm(config: Mapping[str, Any]) -> Algorithm:
    """Check all keys of a config and return its algorithm; raise ValueError if a setting is invalid."""
    settings = checked(Settings, config)
    if not settings.rl:
        raise ValueError(f"preset=null: set it to one of {', '.join(presets())}")
    if not settings.policy:
        raise ValueError("model=null: set it to the Hugging Face folder of the model to train")
    section = dict(settings.rl)
    if settings.environments is not None:
        section["environments"] = settings.environments
    algorithm = algorithm_of(of_steps(section), where="rl")
    used, other = ("tasks", "pairs") if isinstance(algorithm, PolicyGradient) else ("pairs", "tasks")
    sources = {"tasks": settings.tasks.train, "pairs": settings.pairs.get("train")}
    if not sources[used]:
        key = "tasks.train.path" if used == "tasks" else "pairs.train"
        raise ValueError(f"{used}.train=null: set {key}=FILE, as algorithm={algorithm.algorithm} trains on {used}")
    _check_processes(settings, algorithm)
    if isinstance(algorithm, PolicyGradient):
        _check_while_training(config, settings, algorithm)
        _check_curriculum(settings, algorithm)
    if sources[other]:
        raise ValueError(f"algorithm={algorithm.algorithm} trains on {used}, not on {other}; remove {other}.train")
    return algorithm


def _check_processes(settings: Settings, algorithm: Algorithm) -> None:
    """Raise ValueError if TRL cannot divide the run among its processes."""
    processes = settings.launcher.nproc_per_node
    shared = {"rl.batch": algorithm.batch}
    if isinstance(algorithm, PolicyGradient):
        shared["rl.prompts_per_step"] = algorithm.prompts_per_step  # each process generates whole groups
    for key, value in shared.items():
        if value % processes:
            raise ValueError(f"{key}={value} must be a multiple of launcher.nproc_per_node={processes}; change one")
    train = settings.tasks.train
    alone = {
        "tasks.train.reprofile": train is not None and train.reprofile is not None,
        # TRL passes the reference's log-probabilities through a file that only one process finds.
        "algorithm=rpo": algorithm.algorithm == "rpo",
        "trl.precompute_ref_log_probs": (settings.trl or {}).get("precompute_ref_log_probs"),
    }
    if processes > 1 and (unsupported := next((name for name, used in alone.items() if used), None)):
        raise ValueError(f"launcher.nproc_per_node={processes} does not support {unsupported}; remove one of them")


def _check_curriculum(settings: Settings, algorithm: PolicyGradient) -> None:
    """Raise ValueError if the tasks' order differs from `rl.curriculum`; print a notice with `on_inexpressible=warn`.

    A curriculum that an earlier job has yet to make is not read.
    """
    curriculum, train = algorithm.curriculum, settings.tasks.train or TrainTasks()
    if curriculum is None:
        return
    problem = ""
    if not train.curriculum:
        problem = (
            f"rl.curriculum (drop_from={curriculum.drop_from}, easy_to_hard={str(curriculum.easy_to_hard).lower()}) "
            "requires tasks in the order of `nemo-ext curriculum`; set tasks.train.curriculum=FOLDER, or "
            "rl.curriculum=null for any other order"
        )
    elif (path := Path(train.curriculum).expanduser() / STATS).is_file():
        made = json.loads(path.read_bytes())["settings"]
        dropped, falling = made["filters"]["drop_from"], made["mean_first"] > made["mean_last"]
        if dropped != curriculum.drop_from:
            problem = (
                f"tasks.train.curriculum={train.curriculum} was made with filters.drop_from={dropped}, but "
                f"rl.curriculum.drop_from={curriculum.drop_from}; make it again, or set rl.curriculum.drop_from to "
                f"{dropped}"
            )
        elif curriculum.easy_to_hard and not falling:
            problem = (
                f"tasks.train.curriculum={train.curriculum} does not go from easy to hard (mean_first="
                f"{made['mean_first']}, mean_last={made['mean_last']}), as rl.curriculum.easy_to_hard=true requires; "
                "make it again, or set rl.curriculum.easy_to_hard=false"
            )
    if problem and settings.on_inexpressible == "error":
        raise ValueError(problem)
    if problem:
        notice(f"the run differs from the preset: {problem}")


def _check_while_training(config: Mapping[str, Any], settings: Settings, algorithm: PolicyGradient) -> None:
    """Raise ValueError for NeMo Gym, `reprofile` or `adapt` where the engine or the algorithm does not support it."""
    train = settings.tasks.train or TrainTasks()
    for name in algorithm.environments:
        if name.startswith(GYM) and settings.engine != "nemo_rl":
            raise ValueError(
                f"environments.{name} is an environment of NeMo Gym, which requires engine=nemo_rl; set engine=nemo_rl"
            )
    if train.reprofile is not None and settings.engine != "trl":
        raise ValueError(
            f"tasks.train.reprofile requires engine=trl, because engine={settings.engine} cannot measure pass rates "
            "during training; set engine=trl, or remove reprofile"
        )
    if train.adapt is not None and settings.engine != "trl" and algorithm.asynchronous:
        raise ValueError(
            f"tasks.train.adapt cannot be combined with rl.asynchronous, because {READS_AHEAD}; set "
            "rl.asynchronous=null"
        )
    if train.adapt is not None and settings.engine == "nemo_rl" and algorithm.logits is not None:
        raise ValueError(
            "tasks.train.adapt cannot be combined with rl.distillation.logits in engine=nemo_rl, whose loop does not "
            "report the rewards of groups; remove one of the two, or set engine=trl"
        )
    if train.reprofile is None:
        return
    if settings.lora is not None:
        raise ValueError(
            "tasks.train.reprofile cannot be combined with lora, whose checkpoints have only adapters; remove one"
        )
    if train.reprofile.plateau and not settings.tasks.validation:
        raise ValueError("tasks.train.reprofile.plateau requires validation rewards; set tasks.validation.path")
    if algorithm.group is not None and algorithm.group.judge:
        raise ValueError(
            "tasks.train.reprofile requires pass rates, but rl.group.judge only compares responses; remove one of them"
        )
    if not train.curriculum or (Path(train.curriculum).expanduser() / STATS).is_file():  # else an earlier job makes it
        given = config["tasks"]["train"]
        Curricula.from_config(given, Path("."), prompts=algorithm.prompts_per_step, steps=algorithm.steps or 1)
