"""Keys of `nemo-ext quantize`, checked without reading any file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.quantization.calibration import CalibrationSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a quantisation.

    Attributes:
        source: path of a Hugging Face folder, or of a Megatron run directory or checkpoint.
        to: folder to write.
        plan: precision plan of the weights.
        calibration: settings of the calibration data.
        device: `auto`, `cpu`, `cuda` or the name of one GPU.
        shard_gigabytes: size of a file in gigabytes.
        files_from: folder with the tokenizer; None for the source's own.
        iteration: iteration of a run; None for the newest.
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
    """The checked settings of a composed config.

    Raises:
        ValueError: an invalid value; names the key, its value and the valid ones.
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
