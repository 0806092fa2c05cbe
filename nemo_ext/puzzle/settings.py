"""Settings in a config's `puzzle:` section. Does not import torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import REPLACED, STRICT, Place, checked, nearest
from nemo_ext.puzzle.choice.problem import Limit
from nemo_ext.puzzle.choice.search import GAP, TIME_LIMIT
from nemo_ext.puzzle.cost import REQUEST_SECONDS, RESOURCES, Serving
from nemo_ext.puzzle.stages.shards import SHARDED, Shard
from nemo_ext.puzzle.variants import Choices

THROUGHPUT = "throughput"
Name = Annotated[str, StringConstraints(pattern=r"^[\w-]+$")]


def limit(where: str, value: Any, *, at_least: bool = False) -> Limit:
    """Parse a limit: a number, which is the upper bound (with `at_least`, the lower), or `{lower: ..., upper: ...}`.

    `where` is the config key of the value, for error messages.

    Raises:
        ValueError: the value is neither, its bounds cross, or it has an upper bound despite `at_least`.
    """
    if value == {}:
        raise ValueError(f"{where}={{}}: expected a number, or {{lower: ..., upper: ...}}")
    if not isinstance(value, Mapping):
        value = {"lower" if at_least else "upper": value}
    bounds = checked(Limit, value, where, strict=True)
    if bounds.lower > bounds.upper:
        raise ValueError(f"{where}: lower={bounds.lower:g} must not be above upper={bounds.upper:g}")
    if at_least and bounds.upper < math.inf:
        raise ValueError(f"{where} supports only a lower bound: set it to a number")
    return bounds


def _check_resource(where: str, name: str, more: Iterable[str] = ()) -> None:
    known = (*RESOURCES, REQUEST_SECONDS, *more)
    if name not in known:
        raise ValueError(f"puzzle.search.{where}: unknown resource {name!r}; {nearest(name, known)}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batches:
    """Size of a data set, in sequences and batches.

    Attributes:
        sequences: number of sequences, of `megatron.seq_length` tokens each.
        batch: sequences per batch.
    """

    sequences: PositiveInt = 128
    batch: PositiveInt = 4


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Training:
    """Settings of block-wise distillation, `puzzle.distill`, described in hydra_conf/compression.yaml."""

    steps: NonNegativeInt = 1000
    batch: PositiveInt = 16
    lr: PositiveFloat = 1e-3
    together: PositiveInt = 16
    clip: PositiveFloat = 1.0
    save_interval: PositiveInt = 100
    inputs: Place | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Measure:
    """Source of latencies other than the roofline, `puzzle.measure`, described in hydra_conf/compression.yaml."""

    enabled: bool = False
    min_seconds: PositiveFloat = 0.2
    table: Place | None = None

    def __post_init__(self) -> None:
        if self.enabled and self.table is not None:
            raise ValueError("puzzle.measure.enabled and puzzle.measure.table are both set: set only one of them")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sweep:
    """Pareto front to draw.

    Attributes:
        resource: resource on the horizontal axis; null to draw no front.
        smallest: leftmost point, as a fraction of the parent's total.
        points: number of points.
    """

    resource: str | None = "parameters"
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.3
    points: PositiveInt = 15

    def __post_init__(self) -> None:
        if self.resource is not None:
            _check_resource("sweep.resource", self.resource)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Search:
    """Objective and limits of the search, `puzzle.search`, described in hydra_conf/compression.yaml."""

    metric: Literal["kl", "loss", "cosine"] = "kl"
    shares: Annotated[dict[str, Any], REPLACED] = field(default_factory=dict)
    limits: Annotated[dict[str, Any], REPLACED] = field(default_factory=dict)
    pool: PositiveInt = 1
    min_distance: PositiveInt = 1
    gap: Annotated[float, Field(ge=0, lt=1)] = GAP
    time_limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] = TIME_LIMIT
    sweep: Sweep = Sweep()

    def __post_init__(self) -> None:
        if not self.shares and not self.limits:
            raise ValueError(
                "puzzle.search has neither shares nor limits: limit the cost of the child, for example "
                "'puzzle.search.shares={parameters: 0.6}'"
            )
        for where, bounds in (("shares", self.shares), ("limits", self.limits)):
            for name, value in bounds.items():
                _check_resource(where, name, [THROUGHPUT] if where == "limits" else [])
                limit(f"puzzle.search.{where}.{name}", value, at_least=name == THROUGHPUT)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fuse:
    """Settings of FFN fusion, `puzzle.fuse`, described in hydra_conf/compression.yaml."""

    enabled: bool = True
    keep_last: bool = True
    max_width: PositiveInt | None = None
    max_bytes: PositiveFloat | None = None
    max_blocks: Annotated[int, Field(ge=2)] | None = None
    max_groups: PositiveInt | None = None
    largest_dependency: NonNegativeFloat | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Heal:
    """Settings of the child's distillation and further training, `puzzle.heal`; see hydra_conf/compression.yaml.

    The learning rate decays to a tenth of its peak, by a cosine.
    """

    tokens: NonNegativeFloat = 0
    lr: PositiveFloat = 1e-3
    warmup_tokens: NonNegativeFloat = 0
    teacher: Literal["online", "cached"] = "online"
    kl_weight: PositiveFloat = 1.0
    lm_weight: NonNegativeFloat = 0.0
    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    continue_tokens: NonNegativeFloat = 0
    megatron: Annotated[dict[str, Any], REPLACED] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.teacher == "cached" and self.top_k is None:
            raise ValueError(
                "puzzle.heal.teacher=cached requires the number of the teacher's most probable tokens to save: set it, "
                "for example with puzzle.heal.top_k=64"
            )
        if self.teacher == "cached" and (self.temperature != 1 or self.kl_weight + self.lm_weight != 1):
            raise ValueError(
                "puzzle.heal.teacher=cached supports neither a temperature nor weights with a sum other than 1: set "
                "puzzle.heal.temperature=1, and puzzle.heal.kl_weight and lm_weight to a sum of 1"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings under `puzzle:` (hydra_conf/compression.yaml describes the keys)."""

    parent: Place | None = None
    child: Name = "child"
    stages: list[str] | None = None
    shard: str | None = None
    fsdp: Literal["shard", "offload"] | None = None
    mtp: Literal["keep", "drop"] = "keep"
    variants: Choices = Choices()
    calibration: Batches = Batches()
    distill: Training = Training()
    serving: Serving = Serving()
    measure: Measure = Measure()
    search: Search
    evaluation: Batches = Batches()
    baselines: bool = False
    fuse: Fuse = Fuse()
    heal: Heal = Heal()
    export: bool = False

    def __post_init__(self) -> None:
        if self.shard is None:
            return
        Shard.parse(self.shard)
        if len(self.stages or ()) != 1 or not set(self.stages or ()) <= set(SHARDED):
            stages = " or ".join(f"'puzzle.stages=[{stage}]'" for stage in SHARDED)
            raise ValueError(f"puzzle.shard={self.shard} requires a single stage: add {stages}")

    def runs(self, stage: str) -> bool:
        """Return whether a stage is selected."""
        return self.stages is None or stage in self.stages


def settings(section: Mapping[str, Any]) -> Settings:
    """Check and parse a composed config's `puzzle` section.

    Raises:
        ValueError: a value is invalid; the message names its key and the valid values.
    """
    return checked(Settings, section, "puzzle", strict=True)
