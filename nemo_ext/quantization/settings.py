"""Settings of `nemo-ext quantize`, checked without reading files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.quantization.calibration import CalibrationSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `nemo-ext quantize`.

    Attributes:
        source: path of a Hugging Face directory, or of a Megatron run directory or checkpoint.
        to: directory to write to.
        plan: precision plan of the weights.
        calibration: settings of the calibration data.
        device: `auto`, `cpu`, `cuda` or the name of one GPU.
        shard_gigabytes: maximum size of a weight file in GB.
        files_from: directory with the tokenizer; None to use the source's.
        iteration: iteration of a run to quantise; None for the latest.
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
    """Check and read the settings of a composed config.

    Raises:
        ValueError: a value is invalid; the message gives the key, the value and the valid values.
    """
    if config.get("precision_plan") is None:
        raise ValueError(
            "precision_plan=null: choose which weights are in FP8 or NVFP4, such as with precision=nemotron3_selective"
        )
    plan = Plan.from_config(config["precision_plan"])
    if not plan.uses_fp8 and not plan.uses_nvfp4:
        raise ValueError(
            "precision_plan puts nothing in FP8 or NVFP4, so there is nothing to quantise: set "
            "precision_plan.default=fp8"
        )
    if config["calibration"].get("data") is None:
        raise ValueError("calibration.data=null: set it to packs of `nemo-ext sft_data`, or to files of conversations")
    gigabytes, iteration = config["shard_gigabytes"], config["iteration"]
    if isinstance(gigabytes, bool) or not isinstance(gigabytes, int | float) or gigabytes <= 0:
        raise ValueError(f"shard_gigabytes={gigabytes!r}: expected a positive number")
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
