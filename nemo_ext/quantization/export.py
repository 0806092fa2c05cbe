"""A quantised model as a Hugging Face folder that vLLM loads, written by ModelOpt and checked against its source.

ModelOpt makes the FP8 tensors and their scales. All other tensors stay bit for bit, in their own types, and config.json
is the checkpoint's with `quantization_config` added: transformers would write numbers such as Infinity in a form that
others cannot read. `exclude_modules` is written from the plan, because ModelOpt 0.47 writes broken names where
transformers renames modules (NemotronH).
"""

import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.checkpoint.beside import copy_extras, read_json
from nemo_ext.checkpoint.safetensors_files import CONFIG, SafetensorsReader
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.job.progress import progress_of
from nemo_ext.quantization.modelopt import Matrix

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

QUANT_CONFIG = "hf_quant_config.json"
FP8 = "F8_E4M3"
"""Name of float8_e4m3fn in safetensors."""
SCALES = ("weight_scale", "input_scale", "k_scale", "v_scale")


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Redirects what ModelOpt prints to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def export(
    model: "PreTrainedModel",
    folder: Path,
    *,
    source: SafetensorsReader,
    listed: Sequence[Matrix],
    exclude: Sequence[str],
    names: Mapping[str, str],
    extras: Path,
    shard_gigabytes: float,
) -> None:
    """Write a calibrated model.

    Args:
        model: the model after `mtq.quantize`; ModelOpt packs its weights in place.
        folder: folder to write into.
        source: the checkpoint that the model was read from.
        listed: the checkpoint's matrices with their precisions.
        exclude: names of the modules outside FP8.
        names: checkpoint tensor -> its name in the transformers model.
        extras: folder with the tokenizer and other files that belong beside the weights.
        shard_gigabytes: size of a file in gigabytes.
    """
    from modelopt.torch.export import export_hf_checkpoint

    with prints_to_stderr():
        export_hf_checkpoint(
            model,
            export_dir=folder,
            extra_state_dict=_own_types(model, source, listed, names),
            max_shard_size=f"{round(shard_gigabytes * 1000)}MB",
        )
    quantization = read_json(folder / QUANT_CONFIG), read_json(folder / CONFIG)["quantization_config"]
    copy_extras(extras, folder, code=extras == source.path)
    _write_configs(folder, source.path, quantization, exclude)


def _own_types(
    model: "PreTrainedModel", source: SafetensorsReader, listed: Sequence[Matrix], names: Mapping[str, str]
) -> dict[str, "Tensor"]:
    """Tensors that transformers reads into another type than the checkpoint's, by their names in the model."""
    # Experts that are stacked, here or by transformers alone, share one type; `check` reports a mismatch.
    left = {matrix.tensor for matrix in listed if matrix.precision == "fp8"}
    left |= {stacked for stacked, _ in _single_experts(listed).values()}
    read = model.state_dict()
    return {
        name: source.read(tensor)
        for tensor, name in names.items()
        if tensor not in left
        and read[name].shape == source.tensors[tensor].shape
        and str(read[name].dtype).removeprefix("torch.") != source.tensors[tensor].dtype
    }


def _write_configs(
    folder: Path, source: Path, quantization: tuple[dict[str, Any], dict[str, Any]], exclude: Sequence[str]
) -> None:
    """Writes config.json and hf_quant_config.json: the checkpoint's and ModelOpt's, with the plan's exclusions."""
    alone, inside = quantization
    alone["quantization"]["exclude_modules"] = list(exclude)
    (folder / QUANT_CONFIG).write_text(json.dumps(alone, indent=2) + "\n")
    config = {**read_json(source / CONFIG), "quantization_config": {**inside, "ignore": list(exclude)}}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def check(
    folder: Path, *, source: SafetensorsReader, listed: Sequence[Matrix], tensors: Collection[str]
) -> dict[str, dict[str, int]]:
    """Check an exported folder against its checkpoint and the plan.

    Args:
        folder: folder that was written.
        source: the checkpoint.
        listed: the checkpoint's matrices with their precisions.
        tensors: names of all of the checkpoint's tensors.

    Returns:
        Bytes `before` and `after` of the matrices of each precision, of `scales`, and of `others`.

    Raises:
        CheckpointError: a tensor is missing or unknown, has another precision than planned, or changed outside FP8.
    """
    import torch

    made = SafetensorsReader(folder)
    planned = {matrix.tensor: matrix.precision for matrix in listed}
    single = _single_experts(listed)
    wanted = set(tensors) - {stacked for stacked, _ in single.values()} | single.keys()
    scales = {name for name in made.tensors if name.rpartition(".")[2] in SCALES}
    if wrong := sorted((made.tensors.keys() - scales) ^ wanted):
        where = "is missing" if wrong[0] in wanted else "is not in the checkpoint that it was made from"
        raise CheckpointError(f"{folder}: {wrong[0]} {where} ({len(wrong)} such tensors)")
    sizes: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    with progress_of("checking", len(wanted), unit="tensors") as advance:
        for name, stored in made.tensors.items():
            tensor = made.read(name)
            origin, expert = single.get(name, (name, None))
            kind = "scales" if name in scales else planned.get(origin, "others")
            sizes["after"][kind] = sizes["after"].get(kind, 0) + tensor.nbytes
            if name in scales:
                continue
            own = source.read(origin) if expert is None else source.read(origin)[expert]
            sizes["before"][kind] = sizes["before"].get(kind, 0) + own.nbytes
            if kind == "fp8":
                scale = f"{name.removesuffix('.weight')}.weight_scale"
                if stored.dtype != FP8 or scale not in scales:
                    raise CheckpointError(f"{folder}: {name} is {stored.dtype}, the plan has it in FP8 with {scale}")
            elif tensor.dtype != own.dtype or tensor.shape != own.shape or not torch.equal(_bits(tensor), _bits(own)):
                raise CheckpointError(f"{folder}: {name} changed, and the plan leaves it as it was")
            advance(1)
    return sizes


def _single_experts(listed: Sequence[Matrix]) -> dict[str, tuple[str, int]]:
    """The tensor and the number of each expert that a checkpoint stacks, by the names that ModelOpt writes."""
    return {
        f"{above}.{expert}.{matrix_name}.weight": (matrix.tensor, expert)
        for matrix in listed
        if not matrix.tensor.endswith(".weight")
        for above, _, matrix_name in [matrix.tensor.rpartition(".")]
        for expert in range(matrix.shape[0])
    }


def _bits(tensor: "Tensor") -> "Tensor":
    """Bytes of a tensor, so that NaN equals itself."""
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)
