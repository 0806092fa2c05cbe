"""The `puzzle:` section of a config, checked. No torch."""

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


def limit(where: str, given: Any, *, at_least: bool = False) -> Limit:
    """Bounds from a number (an upper bound, or with `at_least` a lower one) or from `{lower: ..., upper: ...}`.

    Raises:
        ValueError: anything else.
    """
    if given == {}:
        raise ValueError(f"{where}: give it a number, or lower or upper")
    if not isinstance(given, Mapping):
        given = {"lower" if at_least else "upper": given}
    bounds = checked(Limit, given, where, strict=True)
    if bounds.lower > bounds.upper:
        raise ValueError(f"{where}: lower {bounds.lower:g} is above upper {bounds.upper:g}")
    if at_least and bounds.upper < math.inf:
        raise ValueError(f"{where}: only a lower bound makes sense, give a number")
    return bounds


def _check_resource(where: str, name: str, more: Iterable[str] = ()) -> None:
    known = (*RESOURCES, REQUEST_SECONDS, *more)
    if name not in known:
        raise ValueError(f"puzzle.search.{where}: unknown resource {name!r}: {nearest(name, known)}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batches:
    """A part of the data.

    Attributes:
        sequences: number of sequences, of `megatron.seq_length` tokens each.
        batch: sequences per batch.
    """

    sequences: PositiveInt = 128
    batch: PositiveInt = 4


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Training:
    """Training of variants.

    Attributes:
        steps: batches that each variant sees; 0 keeps the weights initialised from the parent.
        batch: global batch size in sequences, over all ranks.
        lr: peak learning rate of AdamW, decayed to zero by a cosine after a short warm-up.
        together: most variants trained in one forward pass of the parent; bounds memory use.
        clip: largest gradient norm of a variant.
        save_interval: steps between checkpoints of variants in training.
        inputs: folder for the inputs of blocks between groups of variants; None to run the parent anew for each.
    """

    steps: NonNegativeInt = 1000
    batch: PositiveInt = 16
    lr: PositiveFloat = 1e-3
    together: PositiveInt = 16
    clip: PositiveFloat = 1.0
    save_interval: PositiveInt = 100
    inputs: Place | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Measure:
    """Latencies of variants, if they are not to come from the roofline.

    Attributes:
        enabled: True to measure them on this machine.
        min_seconds: least time that each measurement is repeated for.
        table: JSON file with those of a serving engine (`nemo_ext.puzzle.latencies`).
    """

    enabled: bool = False
    min_seconds: PositiveFloat = 0.2
    table: Place | None = None

    def __post_init__(self) -> None:
        if self.enabled and self.table is not None:
            raise ValueError("puzzle.measure has both enabled and table: latencies come from one of them")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sweep:
    """The Pareto front that is drawn.

    Attributes:
        resource: resource along its axis; null for no front.
        smallest: leftmost point, as a share of the parent's total.
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
    """Objective and limits of the search.

    Attributes:
        metric: score that is minimised.
        shares: resource -> upper bound as a share of the parent's total; or `{lower: ..., upper: ...}`.
        limits: the same in the resource's own unit; `throughput` is in tokens/s, and a number is a lower bound.
        pool: number of choices evaluated on real data; the best becomes the child.
        min_distance: least number of blocks in which any two of them differ.
        gap: relative optimality gap of the score.
        time_limit: time limit in seconds.
        sweep: see `Sweep`.
    """

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
                "puzzle.search has neither shares nor limits: say what the child may cost, for example "
                "'puzzle.search.shares={parameters: 0.6}'"
            )
        for where, given in (("shares", self.shares), ("limits", self.limits)):
            for name, value in given.items():
                own = [THROUGHPUT] if where == "limits" else []
                _check_resource(where, name, own)
                limit(f"puzzle.search.{where}.{name}", value, at_least=name == THROUGHPUT)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fuse:
    """FFN fusion of the child.

    Attributes:
        enabled: True to fuse runs of FFN blocks.
        keep_last: see `nemo_ext.puzzle.fusion.plan`, also for the following ones.
        max_width: largest width of a fused block.
        max_bytes: most bytes of a fused block's weights in `puzzle.serving.precision`.
        max_blocks: most blocks in one fused block.
        max_groups: most fused blocks.
        largest_dependency: largest mean dependency at which blocks are still fused.
    """

    enabled: bool = True
    keep_last: bool = True
    max_width: PositiveInt | None = None
    max_bytes: PositiveFloat | None = None
    max_blocks: Annotated[int, Field(ge=2)] | None = None
    max_groups: PositiveInt | None = None
    largest_dependency: NonNegativeFloat | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Heal:
    """Knowledge distillation of the child, and further training.

    Attributes:
        tokens: length of the distillation; 0 skips it.
        lr: peak learning rate, decayed by a cosine to a tenth.
        warmup_tokens: length of the linear warm-up.
        teacher: `online`, run alongside; `cached`, its most probable tokens are written to disk first.
        kl_weight: weight of the KL divergence from the teacher.
        lm_weight: weight of the language model loss.
        temperature: temperature of both distributions.
        top_k: number of the teacher's most probable tokens to distil on; null for all.
        continue_tokens: tokens of ordinary training afterwards; 0 skips it.
        megatron: further Megatron flags of these runs.
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
                "puzzle.heal.teacher=cached keeps the teacher's most probable tokens: say how many, "
                "puzzle.heal.top_k=64 for example"
            )
        if self.teacher == "cached" and (self.temperature != 1 or self.kl_weight + self.lm_weight != 1):
            raise ValueError(
                "puzzle.heal.teacher=cached has no temperature and only a mixture of losses: leave temperature at 1, "
                "and let kl_weight and lm_weight make 1 together"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Everything under `puzzle:` (hydra_conf/puzzle.yaml explains the keys)."""

    parent: Place | None = None
    child: Name = "child"
    stages: list[str] | None = None
    shard: str | None = None
    fsdp: Literal["shard", "offload"] | None = None
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
        Shard.of(self.shard)
        if len(self.stages or ()) != 1 or not set(self.stages or ()) <= set(SHARDED):
            one = " or ".join(f"'puzzle.stages=[{stage}]'" for stage in SHARDED)
            raise ValueError(f"puzzle.shard={self.shard} is a part of one stage: say {one} with it")


def settings(section: Mapping[str, Any]) -> Settings:
    """The checked settings of a composed config's section.

    Raises:
        ValueError: an invalid value; names the key under `puzzle.`, its value and the valid ones.
    """
    return checked(Settings, section, "puzzle", strict=True)
