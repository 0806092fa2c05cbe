"""The keys of `nemo-ext quantize`, checked without reading anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.quantization.calibration import CalibrationSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may choose.

    Attributes:
        source: a Hugging Face folder; or a run directory or checkpoint of Megatron.
        to: the folder to make.
        plan: of the weights.
        calibration: which data, and how much of them.
        device: auto, cpu, cuda or one GPU's name.
        shard_gigabytes: size of a file.
        files_from: folder with the tokenizer; None for that of the source.
        iteration: of a run; None for the newest.
    """

    source: Path
    to: Path
    plan: Plan
    calibration: CalibrationSettings
    device: str
    shard_gigabytes: float
    files_from: Path | None
    iteration: int | None


def read_settings(config: Mapping[str, Any]) -> Settings:
    """From a composed config.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    if config.get("precision_plan") is None:
        raise ValueError("precision_plan=null: say what goes into FP8: precision=nemotron3_selective, say")
    plan = Plan.from_config(config["precision_plan"])
    if not plan.uses_fp8:
        raise ValueError(
            "precision_plan: has nothing in FP8, so there is nothing to quantise: precision_plan.default=fp8"
        )
    if config["calibration"].get("data") is None:
        raise ValueError("calibration.data=null: packs of `nemo-ext sft_data`, or files of conversations")
    gigabytes, iteration = config["shard_gigabytes"], config["iteration"]
    if isinstance(gigabytes, bool) or not isinstance(gigabytes, int | float) or gigabytes <= 0:
        raise ValueError(f"shard_gigabytes={gigabytes}: expected a positive number")
    return Settings(
        source=Path(str(config["from"])).expanduser(),
        to=Path(str(config["to"])).expanduser(),
        plan=plan,
        calibration=checked(CalibrationSettings, config["calibration"], where="calibration"),
        device=str(config["device"]),
        shard_gigabytes=float(gigabytes),
        files_from=None if config["files_from"] is None else Path(str(config["files_from"])).expanduser(),
        iteration=None if iteration is None else checked_whole("iteration", iteration, least=0),
    )
