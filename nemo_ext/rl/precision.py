"""An RL run's precision plan, resolved for its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import HEAD, Plan
from nemo_ext.checkpoint.beside import is_hugging_face, read_json
from nemo_ext.checkpoint.formats import read
from nemo_ext.checkpoint.safetensors_files import CONFIG
from nemo_ext.quantization.generation import high_modules, never_quantised
from nemo_ext.quantization.modelopt import matrices
from nemo_ext.rl.settings import Where


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision plan for a model, and the phases that it applies to.

    Attributes:
        high: names of the linear layers that stay out of FP8; they start with `layers.`.
        never: names of the routers, convolutions and output layer that stay out of FP8.
        head: True if the output layer is in FP8.
        where: phases that the plan applies to: generation, training or both.
    """

    plan: Plan
    high: tuple[str, ...]
    never: tuple[str, ...]
    head: bool
    where: Where

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Where | None = None) -> "Precision | None":
        """Resolve the precision plan in an RL run's config; return None if there is no plan or it uses no FP8.

        Args:
            where: generation (the default), training or both.

        Raises:
            ValueError: the plan is invalid or uses NVFP4, or the model's folder has no config.json in a supported
                format.
        """
        if config.get("precision_plan") is None:
            return None
        plan = Plan.from_config(config["precision_plan"])
        if plan.uses_nvfp4:
            raise ValueError("precision_plan: RL does not support NVFP4; use FP8 (precision_plan.default=fp8)")
        folder = Path(str(config["policy"])).expanduser()
        if not is_hugging_face(folder):
            raise ValueError(
                f"precision_plan requires a Hugging Face folder, but model={folder} has no config.json; set model "
                "to a Hugging Face folder"
            )
        source_format, description = read(read_json(folder / CONFIG))
        weights = matrices(plan, description, source_format)
        if not any(matrix.precision == "fp8" for matrix in weights) and plan.kv_cache != "fp8":
            return None
        head = any(matrix.weight.part == HEAD and matrix.precision == "fp8" for matrix in weights)
        return cls(
            plan=plan,
            high=tuple(high_modules(weights)),
            never=tuple(never_quantised(weights)),
            head=head,
            where=where or "generation",
        )

    def in_(self, place: str) -> bool:
        """Return whether the plan applies to the phase `place`: generation or training."""
        return self.where in (place, "both")
