"""Precision plans in Megatron: a RecipeConfig for the modules of a stage that deviate from the model's precision.

Megatron runs every block in the context of `megatron.fp8_format` or `fp4_format`, and looks up each Transformer Engine
module in `TransformerConfig.quant_recipe` when the model is built. It matches names within the stage, where
`decoder.layers.0` is the stage's first block, so each stage gets its own recipe. Without Transformer Engine,
`nemo_ext.megatron.float8_modules` applies the same plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import EMBEDDING, HEAD, LOW, Plan, Weight, assigned, misfits
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
BLACKWELL, NVFP4_TE = (10, 0), "2.7.0.dev0"
"""Compute capability and version of Transformer Engine that NVFP4 needs."""


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
        aware: True for quantisation-aware training, which computes with weights and inputs rounded as in checkpoints.
    """

    plan: Plan
    architecture: Architecture
    aware: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Precision | None":
        """Read plan and architecture from a run's config; None if it has no plan.

        Raises:
            ValueError: see `Plan.from_config` and `Architecture.from_config`.
        """
        if config.get("precision_plan") is None:
            return None
        aware = bool((config.get("train") or {}).get("quantization_aware"))
        return cls(Plan.from_config(config["precision_plan"]), Architecture.from_config(config), aware)

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
                config = assignment.precision if assignment.precision in LOW else "bf16"
                matchers[f"{weight} {number}"] = _matcher(config, pattern)
        matchers["multi-token prediction"] = _matcher("bf16", "mtp.*")
        high = {"override_quantized_autocast": True}
        low = {
            "fp8_quantization_recipe": self.plan.recipe,
            "fp8_format": self.plan.format,
            "override_nonquantized_autocast": True,
        }
        lowest = {"fp4_quantization_recipe": "nvfp4", "override_nonquantized_autocast": True}
        configs = {
            "bf16": {_TYPE: "TEQuantizationParams", "training_recipe": high},
            "nvfp4": {_TYPE: "TEQuantizationParams", "training_recipe": lowest},
        }
        if self.plan.recipe != "delayed":  # delayed scaling is set for the whole model
            configs["fp8"] = {_TYPE: "TEQuantizationParams", "training_recipe": low}
        return RecipeConfig.from_config_dict({"configs": configs, "matchers": matchers})


def _matcher(config: str, pattern: str) -> dict[str, Any]:
    return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}


def plan_flags(config: Mapping[str, Any]) -> dict[str, str]:
    """Return Megatron's flags for a plan's default precision and its routers; empty if the config has no plan.

    Raises:
        ValueError: the plan is invalid, flags also set a precision, sizes do not fit the scaling, or the back end does
            not support the plan.
    """
    precision = Precision.from_config(config)
    check_aware(config, precision)
    if precision is None:
        return {}
    plan, flags = precision.plan, dict[str, str]()
    for name in ("fp8_format", "fp8_recipe", "fp4_format", "fp4_recipe", "te_precision_config_file"):
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
    if plan.uses_fp8 or plan.uses_nvfp4:
        _check_low(config, precision)
        if plan.default in LOW and backend_of(config) != "local":
            fp8, fp4 = {"fp8_format": plan.format, "fp8_recipe": plan.recipe}, {"fp4_format": "e2m1"}
            flags |= fp8 if plan.default == "fp8" else fp4 | {"fp4_recipe": "nvfp4"}
    return flags


AWARE = ("tensorwise", "mxfp8")
"""FP8 scalings of quantisation-aware training: those with the same blocks in training and in ModelOpt's checkpoints."""


def check_aware(config: Mapping[str, Any], precision: Precision | None) -> None:
    """Reject `train.quantization_aware` without a plan that it can follow.

    Raises:
        ValueError: the message names the setting.
    """
    if not (config.get("train") or {}).get("quantization_aware"):
        return
    plan = None if precision is None else precision.plan
    if plan is None or not (plan.uses_fp8 or plan.uses_nvfp4):
        raise ValueError(
            "train.quantization_aware=true requires a precision plan with FP8 or NVFP4, such as precision=nvfp4"
        )
    if plan.uses_fp8 and plan.recipe not in AWARE:
        raise ValueError(
            f"train.quantization_aware=true does not support precision_plan.recipe={plan.recipe}: use "
            f"{' or '.join(AWARE)}"
        )
    if backend_of(config) != "local":
        raise ValueError(
            "train.quantization_aware=true supports only Megatron's own linear layers: set model.backend=local"
        )


def _check_low(config: Mapping[str, Any], precision: Precision) -> None:
    """Reject a plan if sizes, recipe or back end do not support its use of FP8 or NVFP4."""
    plan = precision.plan
    check_backend(config, str(config["model"].get("backend")))
    if problems := misfits(plan, precision.architecture, stored=precision.aware):
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        scaling = f".recipe={plan.recipe} does" if not plan.uses_nvfp4 else ": its scalings do"
        raise ValueError(
            f"precision_plan{scaling} not support some sizes ({'; '.join(problems[:3])}{more}): "
            "change these sizes, or exclude the weights with precision_plan.rules"
        )
    if plan.recipe == "delayed" and any(rule.precision == "fp8" for rule in plan.rules):
        raise ValueError(
            "precision_plan.recipe=delayed applies to the whole model: set precision_plan.default=fp8, and only "
            "exclude modules by rules"
        )
    if backend_of(config) != "local":
        if plan.uses_nvfp4 and plan.nvfp4 == "w4a16":
            raise ValueError(
                "precision_plan.nvfp4=w4a16: Transformer Engine trains with NVFP4 inputs only; use w4a4, or "
                "model.backend=local, which simulates it"
            )
        check_experts(precision)


def check_experts(precision: Precision) -> None:
    """Reject FP8 or NVFP4 experts whose tokens Megatron would not pad for Transformer Engine.

    Raises:
        ValueError: the message names the first such weight.
    """
    plan, sizes = precision.plan, precision.architecture.sizes
    # NVFP4 as the default pads to 128 tokens, which suits every FP8 recipe too.
    padded = {"nvfp4": LOW, "fp8": {"fp8"}}.get(plan.default, set())
    for each in assigned(plan, precision.architecture):
        weight, low = each.weight, each.precision
        if low not in LOW - padded or weight.block is None or sizes[weight.block].kind != "E":
            continue
        if weight.part in ("fc1", "fc2"):
            raise ValueError(
                f"precision_plan sets {weight} to {low} with default={plan.default}, but Megatron pads the tokens of "
                f"experts, as {low.upper()} needs, only if {low.upper()} is the default: set precision_plan.default="
                f"{low}, and exclude modules by rules"
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
    for flag, example in (("fp8_format", "fp8_current"), ("fp4_format", "nvfp4")):
        if config["megatron"].get(flag):
            raise ValueError(f"megatron.{flag} {here}: use a precision_plan, as in precision={example}")
    precision = Precision.from_config(config)
    if precision is not None and precision.plan.uses_fp8 and precision.plan.recipe not in SCALINGS:
        raise ValueError(f"precision_plan.recipe={precision.plan.recipe} {here}: use one of {', '.join(SCALINGS)}")


def check_gpu(config: Mapping[str, Any]) -> None:
    """Reject NVFP4 with Transformer Engine on GPUs before Blackwell or without a version that has its recipe.

    Raises:
        ValueError: the message names the GPU or the version.
    """
    import torch
    from megatron.core.utils import is_te_min_version

    precision = Precision.from_config(config)
    if backend_of(config) == "local" or precision is None or not precision.plan.uses_nvfp4:
        return
    instead = "use precision=fp8_blockwise, or model.backend=local, which simulates NVFP4"
    if torch.cuda.get_device_capability() < BLACKWELL:
        raise ValueError(f"precision_plan: NVFP4 needs Blackwell GPUs, not {torch.cuda.get_device_name()}: {instead}")
    if not is_te_min_version(NVFP4_TE):
        raise ValueError(f"precision_plan: NVFP4 needs Transformer Engine {NVFP4_TE} or later: update it, or {instead}")


def remark(config: Mapping[str, Any]) -> str | None:
    """Return a remark on a run's FP8 or NVFP4 to print before it starts; None if there is nothing to say."""
    import torch

    from nemo_ext.megatron.float8 import has_float8_products

    precision = Precision.from_config(config)
    if precision is None or backend_of(config) != "local":
        return None
    if precision.aware:
        return "quantisation-aware: weights and inputs are rounded as in a checkpoint of `nemo-ext quantize`"
    if precision.plan.uses_nvfp4:
        return (
            "NVFP4 without Transformer Engine is simulated (the same rounding, products in higher precision), for "
            "trying a plan out, not for speed"
        )
    if not precision.plan.uses_fp8:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if precision.plan.recipe == "tensorwise" and has_float8_products(device):
        return "FP8 without Transformer Engine: torch multiplies float8 matrices"
    return (
        f"FP8 without Transformer Engine: {precision.plan.recipe} scaling is simulated (the same rounding, products in "
        "higher precision), for trying a plan out, not for speed"
    )
