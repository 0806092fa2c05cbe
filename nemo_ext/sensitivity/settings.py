"""The `sensitivity:` section of a config, checked. No torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, checked
from nemo_ext.puzzle.settings import Batches


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """What is measured and proposed.

    Attributes:
        model: run directory or Megatron checkpoint.
        per: what is chosen at a time: a block, or a part of one (`in_proj`, `fc1`, ...).
        metric: of the budget: `kl` (of the model's own predictions from those in FP8) or `loss` (what it rises by).
        share: the budget, as a share of what the given plan loses.
        nats: the budget in nats a token, instead.
        attempts: plans that are tried on the calibration set to find the best one within the budget.
        calibration: training data that sensitivities are measured on.
        evaluation: validation data that plans are compared on.
    """

    model: str
    per: Literal["block", "part"] = "block"
    metric: Literal["kl", "loss"] = "kl"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    nats: PositiveFloat | None = None
    attempts: PositiveInt = 8
    calibration: Batches = Batches(sequences=64)
    evaluation: Batches = Batches(sequences=64)


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Of a composed config.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    return checked(Settings, config["sensitivity"], "sensitivity", strict=True)
