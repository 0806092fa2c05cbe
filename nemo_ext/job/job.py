"""Description of a `nemo-ext` command: its arguments, files, resources and results. Standard library only.

Each subpackage declares its commands in `commands.py`, and entry points of the group `nemo_ext.jobs` register them, as
other packages can do (docs/extending.md). The command line, `submit`, `status`, pipelines and reports use only this
description and never refer to a job by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

type Config = Mapping[str, Any]
"""Composed config."""
type Reference = str | Callable[..., Any]
"""Function, or its `module:name`, which is imported when it is called."""


def invoke(function: Reference, *arguments: Any, **named: Any) -> Any:
    """Call a function that may be given as `module:name`."""
    if not isinstance(function, str):
        return function(*arguments, **named)
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(*arguments, **named)


Group = Literal["data", "train", "compress", "reinforcement learning", "serve and evaluate", "cluster", ""]
GROUPS = get_args(Group)
"""Headings of `nemo-ext --help` in order."""


class JobFailed(RuntimeError):
    """Failure that a traceback would not explain, such as the death of a worker process."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Command line keys with a meaning beyond Hydra's grammar.

    Attributes:
        settings: types of the keys (see `nemo_ext.job.keys`), which mark paths, text, and open or replaced sections.
        aliases: keys by their alias on the command line, such as `served` for `model`.
        groups: config groups by the key that selects one of their files, such as `rl` for `preset`.
        added: config groups that recipes include and that are added without a recipe.
        replaces: keys that are removed, by the key that replaces them.
        streams: whether `streams` replaces the recipe's training data.
        loose: whether values that Hydra cannot parse are text, for keys without a dot.
        dry_run: key that `--dry-run` sets.
        literal: function of a key and a value; True if Hydra parses the value, False if it is text, None for other
            keys.
        advice: advice by key, for keys that are often used by mistake.
    """

    settings: Any = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    replaces: Mapping[str, str] = field(default_factory=dict)
    streams: bool = False
    loose: bool = False
    dry_run: str = ""
    literal: Reference | None = None
    advice: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command that parses its arguments itself.

    Attributes:
        name: `nemo-ext NAME`.
        group: heading in `nemo-ext --help`; "" for a config that another command composes.
        help: one-line description.
        main: function that is called with the arguments.
        config: name of its primary config; "" if it is the command's name.
        configs: package of the primary config; config groups are searched there and in hydra_conf.
        grammar: keys of its command line.
    """

    name: str
    group: Group
    help: str
    main: Reference | None = None
    config: str = ""
    configs: str = "hydra_conf"
    grammar: Grammar = Grammar()


@dataclass(frozen=True, slots=True)
class Input:
    """File or folder that a job reads in addition to its training data.

    Attributes:
        key: config key that names it.
        path: path of the file or folder.
        advice: remedy if it is missing.
        model: whether it is a checkpoint.
    """

    key: str
    path: Path
    advice: str
    model: bool = False


@dataclass(frozen=True, kw_only=True)
class Array:
    """Division of a job among the tasks of a Slurm array.

    Attributes:
        key: dotted config key of the task's number; every task has its own record of starts.
        words: arguments of a task, with {number} and {count} replaced.
        tasks: function of the config and slurm.shards that returns the number of tasks.
        rounds: function of the config that returns the number of consecutive arrays.
        shards: whether slurm.shards sets the number of tasks.
    """

    key: str
    words: tuple[str, ...]
    tasks: Callable[[Config, int], int] = lambda config, shards: shards
    rounds: Reference = lambda config: 1
    shards: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    """Models that a job starts from and produces.

    Attributes:
        key: command line key of the model that the job starts from; "" for none.
        start: dotted config key of a checkpoint whose model replaces the config's; "" for none.
        takes: kind of model that it starts from.
        leaves: kind of model that it produces; "" for none.
        place: function of a stage's folder and its arguments by key that returns the path of the produced model, or
            None if the arguments do not determine it.
        trained: whether the produced weights are new, so that a pipeline evaluates them.
        same_sizes: whether the produced model has the sizes of the model that the job starts from.
    """

    key: str = ""
    start: str = ""
    takes: Literal["any", "hugging_face", "checkpoints"] = "any"
    leaves: Literal["", "any", "run", "megatron"] = ""
    place: Callable[[Path, Mapping[str, str]], Path | None] = lambda folder, words: folder
    trained: bool = False
    same_sizes: bool = False


def _run_dir_or_output(config: Config) -> Sequence[Any]:
    return [config["run_dir"] if "run_dir" in config else config["output"]]


@dataclass(frozen=True, kw_only=True)
class Job(Command):
    """Command that runs a composed config; it can be a stage of a pipeline and be submitted to Slurm.

    Attributes:
        run: function that is called with the composed config.
        engines: engines that must be installed, or a function of the config that returns them.
        extras: extras of nemo_ext whose packages must be installed, or a function of the config that returns them.
        resumable: whether the same command resumes an interrupted one.
        check: function of the config and the paths that earlier jobs will write; raises the job's ValueErrors early.
        findings: function of the config, the settings of site and queue, and `paths` and `model_to_come` of
            `nemo_ext.slurm.preflight.findings`; yields further findings.
        inputs: function of the config that returns the files and folders that it reads apart from training data.
        outputs: function of the config that returns the folders, files and prefixes that it writes; null is skipped.
        started: function of the config that returns other jobs that it starts, with their configs.
        model: models that it starts from and produces.
        script: batch script in slurm/ without its suffix; "" if it cannot be submitted.
        size: function of the config and the settings of site and queue that returns the number of nodes, and of GPUs
            per node.
        size_keys: config keys of the number of nodes and of GPUs per node.
        array: division among the tasks of an array; None if it is not divided.
        record: function of the config that returns the paths from which the name of its record of starts is derived,
            if it has no run directory; None for its outputs.
        own_folder: whether its run directory is the folder of its stage in a pipeline.
        training: whether its config is a training run's, with `launcher`, `megatron` and data.
        ranks: "slurm" if Slurm starts its ranks, "asked" if it requests ranks on its nodes, "" if it has none.
        ray: function of the config that returns True if it runs on Ray.
        serving: "replicas" for jobs with several servers of a model, "meanwhile" for jobs that serve models one after
            another.
        server: whether it runs until it is interrupted.
        rehearsed: whether its ranks can be rehearsed.
        saved_step: function of the run directory that returns the step of the newest checkpoint, 0 if there is none.
        figures: function of the run directory that returns `nemo_ext.job.figures.Figures`.
    """

    run: Reference
    engines: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    extras: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    resumable: bool = False
    check: Reference | None = None
    findings: Reference | None = None
    inputs: Callable[[Config], Iterable[Input]] = lambda config: ()
    outputs: Callable[[Config], Sequence[Any]] = _run_dir_or_output
    started: Reference = lambda config: []
    model: Model = Model()
    script: str = ""
    size: Reference = lambda config, settings: (1, 0)
    size_keys: tuple[str, str] = ("slurm.nodes", "launcher.nproc_per_node")
    array: Array | None = None
    record: Callable[[Config], Sequence[Any]] | None = None
    own_folder: bool = False
    training: bool = False
    ranks: Literal["", "slurm", "asked"] = ""
    ray: Callable[[Config], bool] = lambda config: False
    serving: Literal["", "replicas", "meanwhile"] = ""
    server: bool = False
    rehearsed: bool = False
    saved_step: Callable[[Path], int] | None = None
    figures: Reference | None = None


def reads(function: Reference) -> Callable[[Config, Iterable[Path]], Any]:
    """Turn a function that checks only the settings of a config, and no files, into a `Job.check`."""
    return lambda config, coming: invoke(function, config)


def inputs(*read: tuple[str, Any, str], model: Sequence[str] = ()) -> list[Input]:
    """Build inputs from keys, values and advice, skipping null values; the keys in `model` name checkpoints."""
    return [Input(key, Path(str(place)).expanduser(), advice, key in model) for key, place, advice in read if place]


def will_exist(path: Path, coming: Iterable[Path]) -> bool:
    """True if a path exists, or if an earlier job, which writes `coming`, will create it."""
    return path.exists() or is_coming(path, coming)


def is_coming(path: Path, coming: Iterable[Path]) -> bool:
    """True if an earlier job, which writes `coming`, will create a path."""
    wanted = path.resolve()

    def makes(place: Path) -> bool:
        # A folder is created with its first file; names of tokenised files begin with a prefix.
        prefixed = wanted.parent == place.parent and wanted.name.startswith(f"{place.name}_")
        return prefixed or wanted.is_relative_to(place) or place.is_relative_to(wanted)

    return any(makes(place.resolve()) for place in coming)


def at(config: Config, key: str) -> Any:
    """Value of a dotted key; None if the config does not have it."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
