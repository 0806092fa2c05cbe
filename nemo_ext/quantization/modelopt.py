"""ModelOpt config for a precision plan: a Hugging Face model's enabled quantizers, and their scaling.

        plan, description -> matrices (formats/)        all matrices of the checkpoint, with their parts of the plan
        matrices, model   -> parameters                 their names in the transformers model
        parameters        -> config of `mtq.quantize`   all quantizers off, then the plan's on, by full name

ModelOpt ignores names that match no quantizer, so `check_quantizers` verifies the enabled quantizers afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_ext.architecture.blocks import LINEAR
from nemo_ext.architecture.precision_plan import EMBEDDING, HEAD, LOW, Plan, Weight, assigned
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats import Format
from nemo_ext.checkpoint.parameters import Role
from nemo_ext.checkpoint.rules import Shape

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PARTS: Mapping[str, str] = {
    **{"embedding": EMBEDDING, "head": HEAD, "linear": LINEAR, "router": "router"},
    **{"q": "qkv", "k": "qkv", "v": "qkv", "o": "proj", "gate": "fc1", "up": "fc1", "down": "fc2"},
    **{"in_proj": "in_proj", "conv1d": "conv1d", "out_proj": "out_proj"},
    **{"shared_up": "shared_fc1", "shared_down": "shared_fc2"},
    **{"latent_down": "latent_fc1", "latent_up": "latent_fc2"},
}
"""Mapping from the role of a checkpoint's matrix (`nemo_ext.checkpoint.parameters`) to its part in a plan."""
_E4M3 = {"num_bits": (4, 3)}
_TENSOR = {**_E4M3, "axis": None}
_MX: dict[str, Any] = {**_E4M3, "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
SCALINGS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "tensorwise": (_TENSOR, _TENSOR),
    # Without earlier training steps, calibration sets one scale per tensor.
    "delayed": (_TENSOR, _TENSOR),
    # ModelOpt has blocks of 128x128 for weights, but no blocks of 1x128 for inputs.
    "blockwise": ({**_E4M3, "block_sizes": {-1: 128, -2: 128}}, None),
    "mxfp8": (_MX, _MX),
}
"""Mapping from a plan's FP8 recipe to ModelOpt's attributes of weight and input quantizers; None if unquantised."""
NVFP4_BACKEND = "nemo_ext_nvfp4"
_NVFP4 = {
    "num_bits": (2, 1),
    "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)},
    "backend": NVFP4_BACKEND,
}
NVFP4_SCALINGS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "w4a4": (_NVFP4, _NVFP4),
    "w4a16": (_NVFP4, None),
}
"""The same for a plan's form of NVFP4 (`Plan.nvfp4`)."""
ALGORITHMS = {
    **{"tensorwise": "FP8", "delayed": "FP8", "blockwise": "fp8_pb_wo", "mxfp8": "MXFP8"},
    **{"w4a4": "NVFP4", "w4a16": "W4A16_NVFP4"},
}
"""Mapping from a plan's recipe or form of NVFP4 to ModelOpt's name, as in `quantized_layers`."""
MTP = "mtp."
"""Prefix of tensors of multi-token prediction, which transformers does not load and plans leave unchanged."""
_KEY = "k"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a Hugging Face checkpoint.

    Attributes:
        tensor: name of the tensor in the checkpoint.
        weight: the plan's weight that contains the matrix; several matrices may share one (q, k and v; experts).
        precision: precision in the plan.
        shape: `[out, in]`; for stacked experts `[experts, out, in]`.
        keys: True for attention's key projection.
    """

    tensor: str
    weight: Weight
    precision: str
    shape: Shape
    keys: bool = False

    @property
    def module(self) -> str:
        """Name of the matrix's module."""
        return self.tensor.removesuffix(".weight")


def matrices(plan: Plan, description: Description, checkpoint_format: Format) -> list[Matrix]:
    """List all matrices of a checkpoint's main model with their precisions, in model order.

    Args:
        plan: precision plan of the weights.
        description: the model's description.
        checkpoint_format: format of the checkpoint.

    Raises:
        ValueError: a rule of the plan does not match the model, or the format has no mapping for a block.
    """
    entries = {(entry.weight.block, entry.weight.part): entry for entry in assigned(plan, description.architecture)}
    listed = []
    for row in checkpoint_format.entries(description):
        if row.names[0].startswith(MTP):
            continue
        for role, name, shape in zip(row.roles, row.names, row.shapes, strict=True):
            part = _part(role)
            if part is not None:
                entry = entries[row.block, part]
                listed.append(Matrix(name, entry.weight, entry.precision, shape, role == (_KEY, "weight")))
    return listed


def _part(role: Role) -> str | None:
    """Return the part of a block (as plans name it) that contains a parameter, given its role (module, parameter).

    The part is None for parameters that plans do not contain: norms, biases and Mamba's per-head parameters.
    """
    module, parameter = role
    if module == "experts":  # stacked: the parameter is the matrix
        return PARTS[parameter.removesuffix("_proj")]
    return PARTS.get(module.rpartition(".")[2]) if parameter == "weight" else None


def parameters(model: "PreTrainedModel", tensors: Iterable[str]) -> dict[str, str]:
    """Map a checkpoint's tensors to parameter names in the transformers model; stacked experts share one name.

    Raises:
        ValueError: the model does not have one of the parameters.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    available = model.state_dict().keys()
    names = {tensor: rename_source_key(tensor, renamings, converters)[0] for tensor in tensors}
    for tensor, name in names.items():
        if name not in available:
            raise ValueError(
                f"{type(model).__name__} of the installed transformers has no parameter {name} for the tensor "
                f"{tensor}: install another version of transformers"
            )
    return names


def quantize_config(plan: Plan, listed: Sequence[Matrix], names: Mapping[str, str]) -> dict[str, Any]:
    """Build the config of `mtq.quantize`: all quantizers off, then those of the plan's FP8 and NVFP4 weights on.

    Args:
        plan: precision plan of the weights.
        listed: the checkpoint's matrices.
        names: mapping from the checkpoint's tensors to parameter names in the model, from `parameters`.
    """
    scalings = {"fp8": SCALINGS[plan.recipe], "nvfp4": NVFP4_SCALINGS[plan.nvfp4]}
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    low = {names[matrix.tensor]: matrix.precision for matrix in listed if matrix.precision in LOW}
    for parameter, precision in low.items():
        weights, inputs = scalings[precision]
        # A module's weight, or a parameter with stacked experts, whose quantizers such as
        # `up_proj_weight_quantizers.3` are matched by their singular without a number.
        above = parameter[: -len("weight")] if parameter.endswith(".weight") else f"{parameter}_"
        entries.append({"quantizer_name": f"{above}weight_quantizer", "cfg": dict(weights)})
        if inputs is not None:
            entries.append({"quantizer_name": f"{above}input_quantizer", "cfg": dict(inputs)})
    if plan.kv_cache == "fp8":
        for matrix in listed:
            if matrix.keys:
                attention = names[matrix.tensor].removesuffix(".weight").rpartition(".")[0]
                for what in "kv":
                    entries.append({"quantizer_name": f"{attention}.{what}_bmm_quantizer", "cfg": dict(_TENSOR)})
    # Dynamic scales need no calibration.
    measured = plan.kv_cache == "fp8" or any(scalings[precision][0] is not _MX for precision in low.values())
    return {"quant_cfg": entries, "algorithm": "max" if measured else None}


def register_nvfp4() -> None:
    """Register our rounding as ModelOpt's for NVFP4: the same values, also on a CPU, where ModelOpt has no kernel."""
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
        is_registered_quant_backend,
        register_quant_backend,
    )

    from nemo_ext.megatron.nvfp4 import fake_nvfp4

    def rounded(inputs: "Tensor", quantizer: Any) -> "Tensor":
        return fake_nvfp4(inputs, quantizer.amax)

    if not is_registered_quant_backend(NVFP4_BACKEND):
        register_quant_backend(NVFP4_BACKEND, rounded)


def share_scales(model: "PreTrainedModel", listed: Sequence[Matrix], names: Mapping[str, str]) -> None:
    """Give NVFP4 matrices that vLLM multiplies as one (q, k and v; gate and up) the largest of their FP32 scales.

    Args:
        model: the calibrated model.
        listed: the checkpoint's matrices.
        names: mapping from the checkpoint's tensors to parameter names in the model.
    """
    groups: dict[tuple[object, ...], dict[str, None]] = {}
    for matrix in listed:
        if matrix.precision == "nvfp4":
            key = (matrix.weight.block, matrix.weight.part, matrix.module.rpartition(".")[0])
            groups.setdefault(key, {})[names[matrix.tensor]] = None
    for parameters_ in groups.values():
        for together in zip(*(_quantizers(model, parameter) for parameter in parameters_), strict=True):
            amax = max(quantizer.amax for quantizer in together)
            for quantizer in together:
                quantizer.amax = amax.clone()


def _quantizers(model: "PreTrainedModel", parameter: str) -> list[Any]:
    """Return the quantizers of a weight: one, or one per expert if experts are stacked."""
    if parameter.endswith(".weight"):
        return [model.get_submodule(f"{parameter.removesuffix('weight')}weight_quantizer")]
    quantizers: Any = model.get_submodule(f"{parameter}_weight_quantizers")
    return list(quantizers)


def check_quantizers(model: "PreTrainedModel", config: Mapping[str, Any]) -> None:
    """Check that `mtq.quantize` has enabled exactly the quantizers in its config (from `quantize_config`).

    Raises:
        RuntimeError: a quantizer of the config is missing, or another quantizer is enabled.
    """
    expected = {entry["quantizer_name"] for entry in config["quant_cfg"] if "cfg" in entry}
    on = enabled_quantizers(model)
    if on != expected:
        missing, more = sorted(expected - on), sorted(on - expected)
        problem = f"ModelOpt has no quantizer {missing[0]}" if missing else f"ModelOpt quantises {more[0]} too"
        raise RuntimeError(
            f"{problem} in {type(model).__name__} ({len(missing)} missing, {len(more)} too many): try another ModelOpt "
            "version"
        )


def enabled_quantizers(model: "PreTrainedModel") -> set[str]:
    """Return the names of the enabled quantizers; stacked experts share one name if all of them are enabled."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    states_by_name: dict[str, list[bool]] = {}
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            above, _, last = name.rpartition(".")
            # If only some of a block's experts are on, the plural name marks a mismatch.
            singular = above.removesuffix("s") if last.isdecimal() else name
            states_by_name.setdefault(singular, []).append(module.is_enabled)
    return {name if all(states) else f"{name}s" for name, states in states_by_name.items() if any(states)}


def check_calibrated(model: "PreTrainedModel") -> None:
    """Reject quantizers without a calibrated scale, which would make the checkpoint useless.

    Raises:
        ValueError: a quantizer has no finite scale; the message names the first one.
    """
    from modelopt.torch.quantization.nn import TensorQuantizer

    without = [
        name
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and module.is_enabled
        and (module.block_sizes or {}).get("scale_bits") != _MX["block_sizes"]["scale_bits"]
        and (getattr(module, "_amax", None) is None or not module.amax.isfinite().all())
    ]
    if without:
        raise ValueError(
            f"calibration: no sample reached {len(without)} quantizers, such as {without[0]}, or their inputs are not "
            "finite: raise calibration.samples, or check the model's loss"
        )


def excluded(listed: Sequence[Matrix], head: str) -> list[str]:
    """List the modules outside FP8 and NVFP4 for a checkpoint's `exclude_modules`; a block's experts are one pattern.

    Args:
        listed: the checkpoint's matrices.
        head: the output layer's module name; with tied embeddings, it exists in engines but not in the checkpoint.
    """
    names = []
    for matrix in listed:
        if matrix.precision not in LOW:
            above, dot, _ = matrix.module.partition(".experts.")
            names.append(f"{above}.experts*" if dot else matrix.module)
    if not any(matrix.weight.part == HEAD for matrix in listed):
        names.append(head)
    return list(dict.fromkeys(names))


def layer_algorithms(plan: Plan, modules: Iterable[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Return `quantized_layers` of a checkpoint with several algorithms: each module's algorithm and block size.

    Args:
        plan: precision plan of the weights.
        modules: names of the checkpoint's quantised modules, and their precisions.
    """
    sizes = {"w4a4": 16, "w4a16": 16, "mxfp8": 32}
    forms = {"fp8": plan.recipe, "nvfp4": plan.nvfp4}
    return {
        module: {
            "quant_algo": ALGORITHMS[forms[precision]],
            **({"group_size": sizes[forms[precision]]} if forms[precision] in sizes else {}),
        }
        for module, precision in modules
    }
