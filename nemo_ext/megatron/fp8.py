"""Precision plans in Megatron: a RecipeConfig for the modules of a stage that deviate from the model's precision.

Megatron runs every block in the context of `megatron.fp8_format`, and looks up each Transformer Engine module in
`TransformerConfig.quant_recipe` when the model is built. It matches names within the stage, where `decoder.layers.0` is
the stage's first block, so each stage gets its own recipe. Without Transformer Engine,
`nemo_ext.megatron.float8_modules` applies the same plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import EMBEDDING, HEAD, Plan, Weight, assigned, misfits
from nemo_ext.megatron.arguments import backend_of

if TYPE_CHECKING:
    from megatron.core.quantization.quant_config import RecipeConfig

MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "M": {"in_proj": ("mixer.in_proj",), "conv1d": ("mixer.conv1d*",), "out_proj": ("mixer.out_proj",)},
    "*": {"qkv": ("self_attention.linear_qkv",), "proj": ("self_attention.linear_proj",)},
    "-": {"fc1": ("mlp.linear_fc1",), "fc2": ("mlp.linear_fc2",)},
    "E": {
        "router": ("mlp.router",),
        # Grouped GEMM, and separate experts.
        "fc1": ("mlp.experts.linear_fc1", "mlp.experts.local_experts.*.linear_fc1"),
        "fc2": ("mlp.experts.linear_fc2", "mlp.experts.local_experts.*.linear_fc2"),
        "shared_fc1": ("mlp.shared_experts.linear_fc1",),
        "shared_fc2": ("mlp.shared_experts.linear_fc2",),
        "latent_fc1": ("mlp.fc1_latent_proj",),
        "latent_fc2": ("mlp.fc2_latent_proj",),
    },
}
"""Mapping from block kinds and their parts to the names of Megatron's modules below `decoder.layers.N.`."""
_TYPE = "transformer_engine_config_type"


def module_patterns(weight: Weight, kind: str, *, first_block: int = 0) -> tuple[str, ...]:
    """Return glob patterns for the names, within a pipeline stage, of the modules that hold a weight.

    Args:
        weight: weight of the model.
        kind: kind of its block; "" for the embedding and the output layer.
        first_block: 0-based number of the stage's first block.
    """
    if weight.block is None:
        return {EMBEDDING: ("embedding.word_embeddings",), HEAD: ("output_layer",)}[weight.part]
    # The weight of a linear block belongs to its sub-layer itself.
    inside = MODULES[kind].get(weight.part, ("self_attention", "mlp", "mixer"))
    return tuple(f"decoder.layers.{weight.block - first_block}.{name}" for name in inside)


@dataclass(frozen=True)
class Precision:
    """Precision plan, together with the model to which it applies.

    Attributes:
        plan: precisions of the weights.
        architecture: the model's architecture.
    """

    plan: Plan
    architecture: Architecture

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Precision | None":
        """Read plan and architecture from a run's config; None if it has no plan.

        Raises:
            ValueError: see `Plan.from_config` and `Architecture.from_config`.
        """
        if config.get("precision_plan") is None:
            return None
        return cls(Plan.from_config(config["precision_plan"]), Architecture.from_config(config))

    def recipe_config(self, stage: Iterable[int]) -> "RecipeConfig":
        """Build Megatron's recipe for a pipeline stage.

        Args:
            stage: 0-based numbers of the stage's blocks, in order.
        """
        from megatron.core.quantization.quant_config import RecipeConfig

        numbers = list(stage)
        first = numbers[0] if numbers else 0
        matchers = {}
        for assignment in assigned(self.plan, self.architecture):
            weight = assignment.weight
            if weight.block is not None and weight.block not in numbers:
                continue
            kind = "" if weight.block is None else self.architecture.sizes[weight.block].kind
            for number, pattern in enumerate(module_patterns(weight, kind, first_block=first)):
                matchers[f"{weight} {number}"] = {
                    "config": "fp8" if assignment.precision == "fp8" else "bf16",
                    "type": "glob",
                    "pattern": pattern,
                    "enabled": True,
                }
        high = {"override_quantized_autocast": True}
        low = {
            "fp8_quantization_recipe": self.plan.recipe,
            "fp8_format": self.plan.format,
            "override_nonquantized_autocast": True,
        }
        configs = {"bf16": {_TYPE: "TEQuantizationParams", "training_recipe": high}}
        if self.plan.recipe != "delayed":  # delayed scaling is set for the whole model
            configs["fp8"] = {_TYPE: "TEQuantizationParams", "training_recipe": low}
        return RecipeConfig.from_config_dict({"configs": configs, "matchers": matchers})


def plan_flags(config: Mapping[str, Any]) -> dict[str, str]:
    """Return Megatron's flags for a plan's default precision and its routers; empty if the config has no plan.

    Raises:
        ValueError: the plan is invalid, flags also set a precision, sizes do not fit the scaling, or the back end does
            not support the plan.
    """
    precision = Precision.from_config(config)
    if precision is None:
        return {}
    plan, flags = precision.plan, dict[str, str]()
    for name in ("fp8_format", "fp8_recipe", "te_precision_config_file"):
        if config["megatron"].get(name):
            raise ValueError(f"megatron.{name} and precision_plan are both set: remove one of them")
    routers, high = set(), []
    for assignment in assigned(plan, precision.architecture):
        if assignment.weight.part == "router":
            routers.add(assignment.precision)
        elif assignment.precision == "fp32":
            high.append(assignment.weight)
    if high or len(routers) > 1:
        what = high[0] if high else "only some routers"
        raise ValueError(
            f"precision_plan sets {what} to fp32, but Megatron supports fp32 only for routers, and only for all of "
            "them: use bf16"
        )
    if routers == {"fp32"}:
        flags["moe_router_dtype"] = "fp32"
    if plan.uses_fp8:
        _check_fp8(config, precision)
        if plan.default == "fp8" and backend_of(config) != "local":
            flags |= {"fp8_format": plan.format, "fp8_recipe": plan.recipe}
    return flags


def _check_fp8(config: Mapping[str, Any], precision: Precision) -> None:
    """Reject a plan if sizes, recipe or back end do not support its use of FP8."""
    plan = precision.plan
    check_backend(config, str(config["model"].get("backend")))
    if problems := misfits(plan, precision.architecture):
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"precision_plan.recipe={plan.recipe} does not support some sizes ({'; '.join(problems[:3])}{more}): "
            "change them, or exclude these weights by rules"
        )
    if plan.recipe == "delayed" and any(rule.precision == "fp8" for rule in plan.rules):
        raise ValueError(
            "precision_plan.recipe=delayed applies to the whole model: set precision_plan.default=fp8, and only "
            "exclude modules by rules"
        )
    if backend_of(config) != "local":
        check_experts(precision)


def check_experts(precision: Precision) -> None:
    """Reject FP8 experts whose tokens Megatron would not pad for Transformer Engine.

    Raises:
        ValueError: the message names the first such weight.
    """
    plan, sizes = precision.plan, precision.architecture.sizes
    weights = [each.weight for each in assigned(plan, precision.architecture) if each.precision == "fp8"]
    experts = [
        weight
        for weight in weights
        if weight.part in ("fc1", "fc2") and weight.block is not None and sizes[weight.block].kind == "E"
    ]
    if experts and plan.default != "fp8":
        raise ValueError(
            f"precision_plan sets {experts[0]} to fp8 with default={plan.default}, but Megatron pads the tokens of "
            "experts, as FP8 needs, only if FP8 is the default: set precision_plan.default=fp8, and exclude modules "
            "by rules"
        )


def check_backend(config: Mapping[str, Any], backend: str) -> None:
    """Reject FP8 that needs Transformer Engine if the back end is local: Megatron would silently train without FP8.

    Args:
        config: config of a run, including the flags from `plan_flags`.
        backend: `local` or `transformer_engine`.

    Raises:
        ValueError: the message names the key that turns FP8 on.
    """
    from nemo_ext.megatron.float8 import SCALINGS

    if backend != "local":
        return
    here = "needs Transformer Engine, but model.backend is local here (no CUDA, or not installed)"
    if config["megatron"].get("fp8_format"):
        raise ValueError(f"megatron.fp8_format {here}: use a precision_plan, as in precision=fp8_current")
    precision = Precision.from_config(config)
    if precision is not None and precision.plan.uses_fp8 and precision.plan.recipe not in SCALINGS:
        raise ValueError(f"precision_plan.recipe={precision.plan.recipe} {here}: use one of {', '.join(SCALINGS)}")


def remark(config: Mapping[str, Any]) -> str | None:
    """Return a remark on a run's FP8 to print before it starts; None if there is nothing to say."""
    import torch

    from nemo_ext.megatron.float8 import has_float8_products

    precision = Precision.from_config(config)
    if precision is None or not precision.plan.uses_fp8 or backend_of(config) != "local":
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if precision.plan.recipe == "tensorwise" and has_float8_products(device):
        return "FP8 without Transformer Engine: torch multiplies float8 matrices"
    return (
        f"FP8 without Transformer Engine: {precision.plan.recipe} scaling is simulated (the same rounding, products in "
        "higher precision), for trying a plan out, not for speed"
    )
