"""A `nemo-ext` command as one object: its words, files, resources and results. Standard library only.

Each room declares its commands in `commands.py`; entry points of the group `nemo_ext.jobs` name them, ours and those of
other packages (docs/extending.md). The command line, `submit`, `status`, pipelines and reports know no job by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

type Config = Mapping[str, Any]
"""A composed config."""
type Reference = str | Callable[..., Any]
"""A function, or `module:name` of one that is imported when it is called."""


def invoke(function: Reference, *arguments: Any, **named: Any) -> Any:
    """The result of a function that may be named by `module:name`."""
    if not isinstance(function, str):
        return function(*arguments, **named)
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(*arguments, **named)


Group = Literal["data", "train", "compress", "reinforcement learning", "serve and evaluate", "cluster", ""]
GROUPS = get_args(Group)
"""Headings of `nemo-ext --help` in their order."""


class JobFailed(RuntimeError):
    """Failure that a traceback would not explain, such as a worker process that died."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Keys of a command line that mean more than Hydra knows.

    Attributes:
        settings: types of the keys, see `nemo_ext.job.keys`: which are paths or texts, may be new or are replaced.
        aliases: keys by their other names on the command line: `model` for `served`.
        groups: config groups by the keys that choose a file of them: `preset` for `rl`.
        added: config groups that a recipe has and that are added without one.
        replaces: keys that take the place of another key, by the key.
        streams: whether `streams` stands for the recipe's training data.
        loose: whether values of keys without a dot that Hydra cannot read are texts.
        dry_run: the key that `--dry-run` sets.
        literal: function of a key and a value; True if Hydra reads the value, False if it is a text, None for other
            keys.
        advice: what to do about a key that is often written here by mistake.
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
    """A command that parses its arguments itself.

    Attributes:
        name: `nemo-ext NAME`.
        group: heading in `nemo-ext --help`; "" for a config that another command composes.
        help: one line on what it does.
        main: function that gets the arguments.
        config: name of its primary config; "" for its own name.
        configs: package that has it; groups are looked for there and in hydra_conf.
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
    """A file or folder that a job reads besides its training data.

    Attributes:
        key: the key that names it.
        path: the file or folder.
        advice: what to do if it is missing.
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
        key: dotted key of the config that holds the task's number; a record of starts belongs to each.
        words: words of task {number} of {count}.
        tasks: function of the config and slurm.shards that returns the number of tasks.
        rounds: function of the config that returns the number of arrays that follow each other.
        shards: whether slurm.shards sets the number.
    """

    key: str
    words: tuple[str, ...]
    tasks: Callable[[Config, int], int] = lambda config, shards: shards
    rounds: Reference = lambda config: 1
    shards: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that a job starts from, and the one that it leaves.

    Attributes:
        key: key of the command line that names the model it starts from; "" if it starts from none.
        start: dotted key of a checkpoint whose model takes the place of the config's; "" for none.
        takes: kind of model that it starts from.
        leaves: kind of model that it leaves; "" for none.
        place: function of a stage's folder and its words by key that returns where it leaves the model, None if the
            words do not say.
        trained: whether the model's weights are new, so that a pipeline evaluates it.
        same_sizes: whether it has the sizes of the model that the job starts from.
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
    """A command that runs a composed config; it can be a stage of a pipeline and be submitted to Slurm.

    Attributes:
        run: function that gets the composed config.
        engines: engines that must be installed, or a function of the config that returns them.
        extras: extras of nemo_ext whose packages must be installed, or a function of the config that returns them.
        resumable: whether the same command resumes an interrupted one.
        check: function of the config and the paths that earlier jobs write; raises ValueError where the job would.
        findings: function of the config, the settings of site and queue, and `paths` and `model_to_come` of
            `nemo_ext.slurm.preflight.findings`; yields further findings.
        inputs: function of the config that returns the files and folders that it reads besides its training data.
        outputs: function of the config that returns the folders, files and prefixes that it writes; null is skipped.
        started: function of the config that returns other jobs that it starts, with their configs.
        model: the model that it starts from and leaves.
        script: batch script in slurm/ without its suffix; "" if it cannot be submitted.
        size: function of the config and the settings of site and queue that returns nodes, and GPUs on each.
        size_keys: keys that set nodes and GPUs.
        array: division among the tasks of an array; None if there is none.
        record: function of the config that returns places that name the record of its starts, if it has no run
            directory; None for its outputs.
        own_folder: whether its run directory is the folder of its stage in a pipeline.
        training: whether its config is that of a training run, with `launcher`, `megatron` and data.
        ranks: "slurm" if Slurm starts its ranks, "asked" if it asks for ranks on its nodes, "" if it has none.
        ray: function of the config; True if it runs on Ray.
        serving: "replicas" for jobs with servers of one model, "meanwhile" for jobs that serve one model after another.
        server: whether it ends only when it is interrupted.
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
    """A `check` by a function that reads the settings of a config, and no files that an earlier job may write."""
    return lambda config, coming: invoke(function, config)


def inputs(*read: tuple[str, Any, str], model: Sequence[str] = ()) -> list[Input]:
    """Inputs from keys, values and advice, without values that are null; the keys in `model` name checkpoints."""
    return [Input(key, Path(str(place)).expanduser(), advice, key in model) for key, place, advice in read if place]


def will_exist(path: Path, coming: Iterable[Path]) -> bool:
    """True if a file or folder exists or an earlier job, which writes `coming`, makes it."""
    return path.exists() or is_coming(path, coming)


def is_coming(path: Path, coming: Iterable[Path]) -> bool:
    """True if an earlier job, which writes `coming`, makes a file or folder."""
    wanted = path.resolve()

    def makes(place: Path) -> bool:
        # A folder exists with its first file; tokenised files are named by their prefix.
        prefixed = wanted.parent == place.parent and wanted.name.startswith(f"{place.name}_")
        return prefixed or wanted.is_relative_to(place) or place.is_relative_to(wanted)

    return any(makes(place.resolve()) for place in coming)


def at(config: Config, key: str) -> Any:
    """The value of a dotted key; None if the config has none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
