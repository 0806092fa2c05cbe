"""Settings of `nemo-ext rl`, `rl_tasks` and `gym`, including sections shared with `nemo-ext online`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, StrictBool, StrictInt, ValidationInfo
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, Open, Place, Places, Share, StringsOrNone
from nemo_ext.rl.environments import GYM

Where = Literal["generation", "training", "both"]
Files = Annotated[Places, BeforeValidator(lambda value: value or ())]
AtLeastOne = Annotated[StrictInt, Field(ge=1)]
OF_A_RUN = (
    *("output", "prompts", "rollouts", "profile", "previous", "previous_steps", "batch", "steps", "first_step"),
    *("keys", "rollout_keys", "split_domains"),
)
"""Curriculum settings that the run determines, so that users cannot set them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adapt:
    """Settings of `tasks.train.adapt`: dataset shares that adapt to the rewards during training."""

    # fraction of its configured share that every dataset keeps regardless of its signal; 1 keeps the shares constant
    keep: Annotated[float, Field(gt=0, le=1)] = 0.2
    groups: PositiveInt = 128  # time constant of a dataset's averaged signal, in groups


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reprofile:
    """Settings of `tasks.train.reprofile`: new curricula, made during training from new pass rates."""

    every: PositiveInt | None = None  # number of steps between measurements of pass rates; null for none
    # number of consecutive validations without a better reward than before, after which pass rates are measured; null
    # for none
    plateau: PositiveInt | None = None
    times: PositiveInt = 1  # maximum number of new curricula per run
    samples: PositiveInt = 8  # number of responses per task
    # settings of `nemo-ext curriculum`; the defaults are `exhausted: repeat` and the settings of the run's first
    # curriculum, if it has one, otherwise the job's
    curriculum: Open = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every is None and self.plateau is None:
            raise ValueError("tasks.train.reprofile requires every (steps) or plateau (validations); set at least one")
        if ours := sorted(set(self.curriculum) & set(OF_A_RUN)):
            raise ValueError(f"tasks.train.reprofile.curriculum.{ours[0]} is determined by the run; remove it")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainTasks:
    """Settings of `tasks.train`; see `nemo_ext.rl.plan`."""

    path: Place | None = None
    shuffle: StrictBool = True  # shuffle the file again for every epoch
    curriculum: Place | None = None
    directory: Place | None = None
    blend: Any = None
    streams: Any = None
    adapt: Adapt | None = None
    reprofile: Reprofile | None = None
    seed: StrictInt = 1234

    def __post_init__(self) -> None:
        if self.adapt is not None and self.directory is None:
            raise ValueError("tasks.train.adapt requires tasks.train.directory with a blend of several files; set both")
        if self.adapt is not None and self.reprofile is not None:
            raise ValueError("tasks.train.reprofile and tasks.train.adapt both set the shares; remove one of them")


def _by_path(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        raise ValueError(f"tasks.{info.field_name}={value} is not a section; set tasks.{info.field_name}.path={value}")
    return value or None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tasks:
    """Settings of the section `tasks`: training and validation tasks."""

    train: Annotated[TrainTasks | None, BeforeValidator(_by_path)] = None
    validation: Annotated[Mapping[Literal["path"], Place] | None, BeforeValidator(_by_path)] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NemoRl:
    """Settings of the section `nemo_rl`, for training with NeMo-RL."""

    backend: Literal["megatron", "dtensor"]
    set: Open | None
    fp8_in: Where | None = None
    layout: str | None = None
    gpu_memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lora:
    """Settings of the section `lora`: low-rank adapters, trained instead of all weights."""

    rank: PositiveInt = 16  # rank of the adapters
    alpha: PositiveInt | None = None  # the adapters' output is scaled by alpha / rank; null for twice the rank
    dropout: Share = 0.0  # fraction of an adapter's inputs that is set to zero in training
    # names of the linear layers with adapters, in the engine's words (docs/rl/lora.md); null for the engine's default
    targets: StringsOrNone | None = None

    @property
    def scale(self) -> int:
        """Value of alpha; twice the rank if it is not set."""
        return 2 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingSettings:
    """Settings of a job that trains with a preset; hydra_conf/rl.yaml explains them."""

    preset: str | None
    run_dir: Place
    rl: Open | None = None
    tasks: Tasks
    trl: Open | None
    on_inexpressible: Literal["error", "warn"]
    micro_batch: AtLeastOne
    save_every: AtLeastOne
    memory_profile: Open | None
    seed: Annotated[StrictInt, Field(ge=0)]
    trust_remote_code: StrictBool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Launcher:
    """Settings of the section `launcher`."""

    nproc_per_node: PositiveInt = 1  # with TRL, number of processes on this machine, one per GPU


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(TrainingSettings):
    """Settings of `nemo-ext rl`."""

    engine: Literal["trl", "nemo_rl"]
    launcher: Launcher = Launcher()
    policy: Place | None
    template: Place | None
    pairs: Mapping[Literal["train", "validation"], Place | None]
    environments: Open | None
    lora: Lora | None = None
    nemo_rl: NemoRl
    precision_plan: Any = None
    megatron: Open | None = None

    def __post_init__(self) -> None:
        if self.engine == "nemo_rl" and (processes := self.launcher.nproc_per_node) > 1:
            raise ValueError(
                f"launcher.nproc_per_node={processes} applies only to engine=trl (NeMo-RL uses whole nodes); remove it"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskSettings:
    """Settings of `nemo-ext rl_tasks`; hydra_conf/rl_tasks.yaml explains them."""

    generator: str | None
    environment: str | None
    records: Files
    count: AtLeastOne | None
    level: AtLeastOne | None
    seed: StrictInt
    settings: Open | None
    thinking: StrictBool | Share | None
    without: Files
    output: Place | None
    solutions: Place | None

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("output=null: set it to the task file to write")
        if self.solutions == self.output:
            raise ValueError(f"solutions={self.solutions} is also the task file (output); set another file")
        recorded = bool(self.records) or (self.environment or "").startswith(GYM)
        if not recorded and not self.generator:
            raise ValueError(
                "generator=null: set it to a generator (docs/rl/tasks.md), or set records=FILES and environment=NAME"
            )
        if not recorded and self.environment:
            raise ValueError(
                f"environment={self.environment} applies only to records, not to generator={self.generator}; remove it"
            )
        for key in ("generator", "level", "settings"):
            if recorded and (value := getattr(self, key)):
                raise ValueError(f"{key}={value} applies only to generated tasks, not to records; remove it")
        if recorded and self.solutions and self.environment != "genrm":
            raise ValueError(
                f"solutions={self.solutions} applies only to generated tasks and environment=genrm; remove it"
            )
        if self.records and not self.environment:
            raise ValueError(
                "environment=null: set it to the kind of tasks to make: chat, genrm, python_tool, terminal or gym-NAME"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GymSettings:
    """Settings of `nemo-ext gym`; hydra_conf/gym.yaml explains them."""

    output: Place | None
    servers: StringsOrNone
    tasks: Files
    seed: StrictInt

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("output=null: set it to the folder in which NeMo Gym will be started")
