"""Description of a `nemo-ext` command: its arguments, files, resources and results. Standard library only.

Each subpackage declares its commands in `commands.py`. Entry points in the group `nemo_ext.jobs` register them, and
other packages can add their own (docs/extending.md). The command line, `submit`, `status`, pipelines and reports use
only this description and never refer to a job by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

type Config = Mapping[str, Any]
"""Composed config."""
type Reference = str | Callable[..., Any]
"""Function, or its `module:name`, which is imported when the function is called."""


def invoke(function: Reference, *arguments: Any, **named: Any) -> Any:
    """Call a function that may be given as `module:name`, and return its result."""
    if not isinstance(function, str):
        return function(*arguments, **named)
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(*arguments, **named)


Group = Literal["data", "train", "compress", "reinforcement learning", "serve and evaluate", "cluster", ""]
GROUPS = get_args(Group)
"""Headings in `nemo-ext --help`, in order."""


class JobFailed(RuntimeError):
    """Raised for a failure that a traceback would not explain, such as the death of a worker process."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Meanings of a command's keys beyond Hydra's grammar.

    Attributes:
        settings: type tree of the keys (see `nemo_ext.job.keys`), which marks paths, text, open and replaced sections.
        aliases: mapping from an alias on the command line to its key, such as from `served` to `model`.
        groups: mapping from the key that selects a config file to the file's config group, such as `preset` to `rl`.
        added: config groups that recipes include, and that are added if there is no recipe.
        replaces: mapping from a key to the key that it replaces, which is removed.
        streams: whether `streams` replaces the recipe's training data.
        loose: whether values of keys without a dot are taken as text if Hydra cannot parse them.
        dry_run: key that `--dry-run` sets.
        literal: function of a key and a value that returns True if Hydra parses the value, False if the value is text,
            and None for other keys.
        advice: mapping from keys that are often used by mistake to advice.
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
    """A `nemo-ext` command that parses its own arguments.

    Attributes:
        name: name of the command, as in `nemo-ext NAME`.
        group: heading in `nemo-ext --help`; "" for a config that another command composes.
        help: one-line description.
        main: function that is called with the list of arguments.
        config: name of its primary config; "" if this is the command's name.
        configs: package with the primary config; config groups are searched there and in hydra_conf.
        grammar: special keys on its command line.
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
    """File or folder that a job reads, other than its training data.

    Attributes:
        key: config key that names it.
        path: path of the file or folder.
        advice: how to obtain it if it is missing.
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
        key: dotted config key for the task's number; every task has its own record of starts.
        words: arguments of each task, in which {number} and {count} are replaced.
        tasks: function of the config and `slurm.shards` that returns the number of tasks.
        rounds: function of the config that returns the number of consecutive arrays.
        shards: whether `slurm.shards` sets the number of tasks.
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
        key: command line key for the model that the job starts from; "" if there is none.
        start: dotted config key for a checkpoint whose model replaces the config's; "" if there is none.
        takes: kind of model that the job starts from.
        leaves: kind of model that the job produces; "" if it produces none.
        place: function of a stage's folder and a mapping of its arguments that returns the produced model's path, or
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


@dataclass(frozen=True, kw_only=True)
class Job(Command):
    """Command that runs a composed config, which can also be a pipeline stage or be submitted to Slurm.

    Attributes:
        run: function that is called with the composed config.
        engines: names of engines that must be installed, or a function of the config that returns them.
        extras: nemo_ext extras whose packages must be installed, or a function of the config that returns them.
        resumable: whether the same command resumes an interrupted one.
        check: function of the config and the paths that earlier jobs will write, which raises the job's ValueErrors
            before it starts.
        findings: function of the config and the site and queue settings that yields further findings; it also gets
            the keyword arguments `paths`, `here` and `model_to_come` of `nemo_ext.slurm.preflight.findings`.
        inputs: function of the config that returns the files and folders it reads, other than training data.
        outputs: function of the config that returns the folders, files and prefixes it writes; null is skipped.
        started: function of the config that returns (name, config) of each other job that it starts.
        model: models that it starts from and produces.
        script: name of its batch script in slurm/, without suffix; "" if it cannot be submitted.
        size: function of the config and the site and queue settings that returns the number of nodes, and the number
            of GPUs per node.
        size_keys: config keys for the number of nodes and for the number of GPUs per node.
        array: division among the tasks of a Slurm array; None if it is not divided.
        record: function of the config that returns the paths from which the name of its record of starts is derived
            if it has no run directory; if None, its outputs.
        own_folder: whether its run directory in a pipeline is its stage's folder.
        training: whether its config is a training config, with `launcher`, `megatron` and data.
        ranks: "slurm" if Slurm starts its ranks, "asked" if it requests ranks on its nodes itself, "" if it has none.
        ray: function of the config that returns True if it runs on Ray.
        serving: "replicas" for jobs with several servers of one model, "meanwhile" for jobs that serve models one after
            another, "" for others.
        server: whether it runs until it is interrupted.
        rehearsed: whether its ranks can be rehearsed (`nemo_ext.rehearsal`).
        saved_step: function of the run directory that returns the newest checkpoint's step, or 0 if there is none.
        figures: function of the run directory that returns `nemo_ext.job.figures.Figures`.
    """

    run: Reference
    engines: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    extras: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()
    resumable: bool = False
    check: Reference | None = None
    findings: Reference | None = None
    inputs: Callable[[Config], Iterable[Input]] = lambda config: ()
    outputs: Callable[[Config], Sequence[Any]] = lambda config: [config["run_dir" if "run_dir" in config else "output"]]
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


def reads(function: Reference, files: str = "") -> Callable[[Config, Sequence[Path]], Any]:
    """Turn a function that checks a config into a `Job.check`, which is also called with the paths of earlier jobs.

    `files` names the function's argument that is True if files are to be checked too, that is, if no earlier job is
    still to write any.
    """
    return lambda config, coming: invoke(function, config, **({files: not coming} if files else {}))


def inputs(*read: tuple[str, Any, str], model: Sequence[str] = ()) -> list[Input]:
    """Build inputs from (key, value, advice) tuples, skipping null values; the keys in `model` name checkpoints."""
    return [Input(key, Path(str(place)).expanduser(), advice, key in model) for key, place, advice in read if place]


def will_exist(path: Path, coming: Iterable[Path]) -> bool:
    """True if a path exists, or if an earlier job that writes the paths `coming` will create it."""
    return path.exists() or is_coming(path, coming)


def is_coming(path: Path, coming: Iterable[Path]) -> bool:
    """True if an earlier job that writes the paths `coming` will create a path."""
    wanted = path.resolve()

    def makes(place: Path) -> bool:
        # A folder is created with its first file; names of tokenised files begin with a prefix.
        prefixed = wanted.parent == place.parent and wanted.name.startswith(f"{place.name}_")
        return prefixed or wanted.is_relative_to(place) or place.is_relative_to(wanted)

    return any(makes(place.resolve()) for place in coming)


def at(config: Config, key: str) -> Any:
    """Look up a dotted key in a config; None if the config does not have it."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
