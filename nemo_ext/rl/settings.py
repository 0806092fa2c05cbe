"""Settings of `nemo-ext rl`, `rl_tasks` and `gym`, and of the sections that they share with `nemo-ext online`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, StrictBool, StrictInt, ValidationInfo
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, Open, Place, Places, Share, StringsOrNone

Where = Literal["generation", "training", "both"]
Files = Annotated[Places, BeforeValidator(lambda value: value or ())]
AtLeastOne = Annotated[StrictInt, Field(ge=1)]
OF_A_RUN = (
    *("output", "prompts", "rollouts", "profile", "previous", "previous_steps", "batch", "steps", "first_step"),
    *("keys", "rollout_keys", "split_domains"),
)
"""Settings of a curriculum that follow from the run."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adapt:
    """Settings of `tasks.train.adapt`."""

    # part of its given share that every dataset keeps, whatever its signal; 1 leaves the shares as they are
    keep: Annotated[float, Field(gt=0, le=1)] = 0.2
    groups: PositiveInt = 128  # number of a dataset's groups over which its signal is averaged, exponentially


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reprofile:
    """Settings of `tasks.train.reprofile`."""

    every: PositiveInt | None = None  # steps after which pass rates are measured again; null for none
    # number of validations in a row after which, if none has a better reward than those before; null for none
    plateau: PositiveInt | None = None
    times: PositiveInt = 1  # most new curricula of a run
    samples: PositiveInt = 8  # answers to each task
    # settings of `nemo-ext curriculum`; those of the run's first curriculum, if it has one, else the job's, are the
    # defaults, and `exhausted: repeat`
    curriculum: Open = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every is None and self.plateau is None:
            raise ValueError("give every (steps) or plateau (validations)")
        if ours := sorted(set(self.curriculum) & set(OF_A_RUN)):
            raise ValueError(f"curriculum.{ours[0]} follows from the run: leave it out")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainTasks:
    """Settings of `tasks.train`, see `nemo_ext.rl.plan`."""

    path: Place | None = None
    shuffle: StrictBool = True  # draw the order of the file anew for every pass over it
    curriculum: Place | None = None
    directory: Place | None = None
    blend: Any = None
    streams: Any = None
    adapt: Adapt | None = None
    reprofile: Reprofile | None = None
    seed: StrictInt = 1234

    def __post_init__(self) -> None:
        if self.adapt is not None and self.directory is None:
            raise ValueError("adapt: shares adapt between files: give directory with a blend")
        if self.adapt is not None and self.reprofile is not None:
            raise ValueError("reprofile and adapt: shares follow from a curriculum or adapt: leave one of them out")


def _by_path(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        raise ValueError(f"tasks.{info.field_name}={value}: write tasks.{info.field_name}.path=FILE")
    return value or None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Tasks:
    """Settings of the section `tasks`."""

    train: Annotated[TrainTasks | None, BeforeValidator(_by_path)] = None
    validation: Annotated[Mapping[Literal["path"], Place] | None, BeforeValidator(_by_path)] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NemoRl:
    """Settings of the section `nemo_rl`."""

    backend: Literal["megatron", "dtensor"]
    set: Open | None
    fp8_in: Where | None = None
    layout: str | None = None
    gpu_memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingSettings:
    """Keys of a job that trains by a preset; hydra_conf/rl.yaml explains them."""

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
class Settings(TrainingSettings):
    """Settings of `nemo-ext rl`."""

    engine: Literal["trl", "nemo_rl"]
    policy: Place | None
    template: Place | None
    pairs: Mapping[Literal["train", "validation"], Place | None]
    environments: Open | None
    nemo_rl: NemoRl
    precision_plan: Any = None
    megatron: Open | None = None


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
            raise ValueError(f"output={self.output}: say the file to write")
        if self.solutions == self.output:
            raise ValueError(f"solutions={self.solutions}: the tasks are written there; name another file")
        if not self.records and not self.generator:
            raise ValueError("generator=null: say which tasks, or give records=FILES and environment=NAME")
        if not self.records and self.environment:
            raise ValueError(f"environment={self.environment}: is for records; generator={self.generator} has one")
        for key in ("generator", "level", "settings"):
            if self.records and (value := getattr(self, key)):
                raise ValueError(f"{key}={value}: is for generated tasks, not for records")
        if self.records and self.solutions and self.environment != "genrm":
            raise ValueError(f"solutions={self.solutions}: is for generated tasks and environment=genrm")
        if self.records and not self.environment:
            raise ValueError(f"environment={self.environment}: say which tasks to make of the records: chat or genrm")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GymSettings:
    """Settings of `nemo-ext gym`; hydra_conf/gym.yaml explains them."""

    output: Place | None
    servers: StringsOrNone
    tasks: Files
    seed: StrictInt

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("output=null: say in which folder NeMo Gym will be started")
