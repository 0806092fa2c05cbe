"""Settings in a config's `sensitivity:` section. Does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.training import check_validation
from nemo_ext.job.settings import STRICT, Place, checked
from nemo_ext.puzzle.settings import Batches


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings of a sensitivity sweep.

    Attributes:
        model: path of a run directory or Megatron checkpoint.
        per: granularity at which precision is chosen: `block`, or `part` of a block (`in_proj`, `fc1`, ...).
        metric: metric that the budget limits: `kl`, KL(unchanged model || model in FP8), or `loss`, its increase.
        share: budget as a fraction of the given plan's loss.
        nats: budget in nats per token, instead of `share`.
        bits: budget in average bits per weight, including scales, instead of `share`: each unit is in NVFP4, FP8 or
            BF16. The average is over the weights that the given plan puts in FP8 or NVFP4.
        attempts: maximum number of plans measured to find the best one within the budget; not used with `bits`.
        calibration: training data for measuring sensitivities.
        evaluation: validation data for comparing plans.
    """

    model: Place
    per: Literal["block", "part"] = "block"
    metric: Literal["kl", "loss"] = "kl"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    nats: PositiveFloat | None = None
    bits: Annotated[float, Field(gt=0, le=16)] | None = None
    attempts: PositiveInt = 8
    calibration: Batches = Batches(sequences=64)
    evaluation: Batches = Batches(sequences=64)


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Check and parse the settings in a composed config.

    Raises:
        ValueError: a value is invalid, there is more than one node, packs have no validation set, or there are two
            budgets.
    """
    if (nodes := config["launcher"]["nodes"]) != 1:
        raise ValueError(f"launcher.nodes={nodes}, but sensitivity runs on one node: set it to 1")
    check_validation(config, "sensitivity")
    chosen = checked(Settings, config["sensitivity"], "sensitivity", strict=True)
    if chosen.bits is not None and chosen.nats is not None:
        raise ValueError("sensitivity.bits and sensitivity.nats are both set: set one of them to null")
    return chosen
