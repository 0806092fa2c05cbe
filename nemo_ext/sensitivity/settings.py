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
    """Settings of a sensitivity sweep, described in hydra_conf/sensitivity.yaml.

    Average bits per weight include scales; the average is over the weights that the given plan puts in FP8 or NVFP4.
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
