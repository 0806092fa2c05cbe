"""Export of a quantised model as a Hugging Face directory for vLLM, written by ModelOpt and checked against its source.

ModelOpt writes the FP8 and NVFP4 tensors and their scales. All other tensors, including those of multi-token
prediction, are bitwise unchanged and keep the checkpoint's types.
config.json is the checkpoint's plus `quantization_config`, because transformers writes values such as Infinity in a
form that other programs cannot read. `exclude_modules` is written from the plan, because ModelOpt 0.47 writes invalid
names if transformers renames modules (NemotronH). For checkpoints with both precisions, `quantized_layers` is written
from the plan as well.
"""

import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.architecture.precision_plan import LOW, Plan
from nemo_ext.checkpoint.beside import copy_extras, read_json
from nemo_ext.checkpoint.safetensors_files import CONFIG, SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.job.progress import progress_of
from nemo_ext.quantization.modelopt import MTP, Matrix, layer_algorithms

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

QUANT_CONFIG = "hf_quant_config.json"
TYPES = {"fp8": "F8_E4M3", "nvfp4": "U8"}
"""Mapping from precisions to the names of their types in safetensors; NVFP4 has two numbers in a byte."""
SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Context manager that redirects what ModelOpt prints to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def export(
    model: "PreTrainedModel",
    folder: Path,
    *,
    source: SafetensorsReader,
    plan: Plan,
    listed: Sequence[Matrix],
    exclude: Sequence[str],
    names: Mapping[str, str],
    extras: Path,
    shard_gigabytes: float,
) -> None:
    """Write a calibrated model as a Hugging Face directory.

    Args:
        model: the model after `mtq.quantize`; ModelOpt packs its weights in place.
        folder: directory to write into.
        source: the checkpoint from which the model was loaded.
        plan: precision plan of the weights.
        listed: the checkpoint's matrices with their precisions.
        exclude: names of the modules outside FP8 and NVFP4.
        names: mapping from the checkpoint's tensors to their names in the transformers model.
        extras: directory with the tokenizer and other files to copy.
        shard_gigabytes: maximum size of a weight file in GB.
    """
    from modelopt.torch.export import export_hf_checkpoint

    with prints_to_stderr():
        export_hf_checkpoint(
            model,
            export_dir=folder,
            extra_state_dict=_own_types(model, source, listed, names) | _prediction(source),
            max_shard_size=f"{round(shard_gigabytes * 1000)}MB",
        )
    alone, inside = read_json(folder / QUANT_CONFIG), read_json(folder / CONFIG)["quantization_config"]
    if "quantized_layers" in alone["quantization"]:
        alone, inside = _by_layer(alone, plan, listed)
    copy_extras(extras, folder, code=extras == source.path)
    _write_configs(folder, source.path, (alone, inside), exclude)


def _prediction(source: SafetensorsReader) -> dict[str, "Tensor"]:
    return {name: source.read(name) for name in source.tensors if name.startswith(MTP)}


def _by_layer(alone: dict[str, Any], plan: Plan, listed: Sequence[Matrix]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rewrite the per-layer algorithms in ModelOpt's hf_quant_config.json (`alone`) with the checkpoint's module names.

    Returns:
        hf_quant_config.json, and the `quantization_config` for config.json, which ModelOpt derives from it.

    Raises:
        CheckpointError: ModelOpt used algorithms that differ from the plan's.
    """
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    single = {name.removesuffix(".weight"): tensor for name, (tensor, _) in _single_experts(listed).items()}
    precisions = {matrix.tensor: matrix.precision for matrix in listed if matrix.precision in LOW}
    separate = [name for name in precisions if name.endswith(".weight")]
    modules = [(name.removesuffix(".weight"), precisions[name]) for name in separate]
    modules += [(name, precisions[tensor]) for name, tensor in single.items() if tensor in precisions]
    layers = layer_algorithms(plan, modules)
    theirs = alone["quantization"]["quantized_layers"]
    found, planned = ({str(layer) for layer in each.values()} for each in (theirs, layers))
    if found != planned:
        raise CheckpointError(
            f"ModelOpt has quantised layers as {', '.join(sorted(found))}, but the plan requires "
            f"{', '.join(sorted(planned))}: try another ModelOpt version"
        )
    alone["quantization"]["quantized_layers"] = layers
    return alone, convert_hf_quant_config_format(alone)


def _own_types(
    model: "PreTrainedModel", source: SafetensorsReader, listed: Sequence[Matrix], names: Mapping[str, str]
) -> dict[str, "Tensor"]:
    """Read the tensors outside FP8 and NVFP4 that transformers has loaded in a type other than the checkpoint's.

    The arguments are those of `export`; the tensors are keyed by their names in the transformers model.
    """
    # Stacked experts, in the checkpoint or only in transformers, share one type; `check` reports a mismatch.
    skipped = {matrix.tensor for matrix in listed if matrix.precision in LOW}
    skipped |= {stacked for stacked, _ in _single_experts(listed).values()}
    read = model.state_dict()
    return {
        name: source.read(tensor)
        for tensor, name in names.items()
        if tensor not in skipped
        and read[name].shape == source.tensors[tensor].shape
        and str(read[name].dtype).removeprefix("torch.") != source.tensors[tensor].dtype
    }


def _write_configs(
    folder: Path, source: Path, quantization: tuple[dict[str, Any], dict[str, Any]], exclude: Sequence[str]
) -> None:
    """Write config.json and hf_quant_config.json into an exported directory.

    Args:
        folder: the exported directory.
        source: directory of the checkpoint, whose config.json is extended.
        quantization: ModelOpt's own hf_quant_config.json, and its `quantization_config` for config.json.
        exclude: names of the modules outside FP8 and NVFP4, which replace ModelOpt's list in both files.
    """
    alone, inside = quantization
    alone["quantization"]["exclude_modules"] = list(exclude)
    (folder / QUANT_CONFIG).write_text(json.dumps(alone, indent=2) + "\n")
    config = {**read_json(source / CONFIG), "quantization_config": {**inside, "ignore": list(exclude)}}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def check(
    folder: Path, *, source: SafetensorsReader, listed: Sequence[Matrix], tensors: Collection[str]
) -> dict[str, dict[str, int]]:
    """Check an exported directory against its checkpoint and the plan.

    Args:
        folder: the exported directory.
        source: the checkpoint.
        listed: the checkpoint's matrices with their precisions.
        tensors: names of all of the checkpoint's tensors.

    Returns:
        Bytes on disk, `before` and `after`, each keyed by planned precision (for matrices; NVFP4's with the scales of
        its blocks), `scales`, `mtp` (multi-token prediction) and `others`.

    Raises:
        CheckpointError: a tensor is missing or unknown, has a precision other than planned, or changed outside FP8 and
            NVFP4.
    """
    import torch

    exported = SafetensorsReader(folder)
    planned = {matrix.tensor: matrix.precision for matrix in listed}
    single = _single_experts(listed)
    expected = set(tensors) - {stacked for stacked, _ in single.values()} | single.keys()
    scales = {name for name in exported.tensors if name.rpartition(".")[2] in SCALES}
    if wrong := sorted((exported.tensors.keys() - scales) ^ expected):
        where = "is missing" if wrong[0] in expected else "is not in the source checkpoint"
        raise CheckpointError(
            f"{folder}: the exported tensor {wrong[0]} {where} ({len(wrong)} such tensors): try another ModelOpt "
            "version"
        )
    sizes: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    with progress_of("checking", len(expected), unit="tensors") as advance:
        for name, stored in exported.tensors.items():
            tensor = exported.read(name)
            origin, expert = single.get(name, (name, None))
            kind = planned.get(origin, "mtp" if name.startswith(MTP) else "others")
            if name in scales:
                of, _, scale = name.rpartition(".")
                weight = f"{of}.weight"
                packed = planned.get(single.get(weight, (weight, None))[0]) == "nvfp4" and scale == "weight_scale"
                kind = "nvfp4" if packed else "scales"
            sizes["after"][kind] = sizes["after"].get(kind, 0) + tensor.nbytes
            if name in scales:
                continue
            original = source.read(origin) if expert is None else source.read(origin)[expert]
            sizes["before"][kind] = sizes["before"].get(kind, 0) + original.nbytes
            if kind in LOW:
                above = name.removesuffix(".weight")
                missing = {f"{above}.weight_scale", *([f"{above}.weight_scale_2"] if kind == "nvfp4" else [])} - scales
                if stored.dtype != TYPES[kind] or missing:
                    raise CheckpointError(
                        f"{folder}: the exported tensor {name} is {stored.dtype}, but the plan requires {kind.upper()} "
                        f"with {above}.weight_scale: try another ModelOpt version"
                    )
            elif (
                tensor.dtype != original.dtype
                or tensor.shape != original.shape
                or not torch.equal(_bits(tensor), _bits(original))
            ):
                raise CheckpointError(
                    f"{folder}: the exported tensor {name} differs from the source, although the plan does not "
                    "quantise it: try another ModelOpt version"
                )
            advance(1)
    return sizes


def _single_experts(listed: Sequence[Matrix]) -> dict[str, tuple[str, int]]:
    """Map the name that ModelOpt writes for each expert of a stacked checkpoint to (stacked tensor, expert number)."""
    return {
        f"{above}.{expert}.{matrix_name}.weight": (matrix.tensor, expert)
        for matrix in listed
        if not matrix.tensor.endswith(".weight")
        for above, _, matrix_name in [matrix.tensor.rpartition(".")]
        for expert in range(matrix.shape[0])
    }


def _bits(tensor: "Tensor") -> "Tensor":
    """View a tensor as bytes, so that NaN equals itself in comparisons."""
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)
