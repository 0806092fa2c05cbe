"""A quantised model as a Hugging Face folder that vLLM loads, written by ModelOpt and held against the checkpoint.

ModelOpt makes the FP8 tensors and their scales. What else the checkpoint held stays bit for bit, in its own types, and
config.json is the checkpoint's with `quantization_config` added: transformers would write numbers such as Infinity in a
way that others cannot read. `exclude_modules` is written from the plan, as that of ModelOpt 0.47 has broken names where
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
"""float8_e4m3fn, as safetensors calls it."""
SCALES = ("weight_scale", "input_scale", "k_scale", "v_scale")


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What ModelOpt prints goes where messages go."""
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
        model: after `mtq.quantize`; ModelOpt packs its weights in place.
        folder: to write into.
        source: the checkpoint that the model was read from.
        listed: its matrices with their precisions.
        exclude: modules outside FP8.
        names: what transformers calls the checkpoint's tensors.
        extras: folder with the tokenizer and what else goes beside the weights.
        shard_gigabytes: size of a file.
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
    """Tensors that transformers read into another type than the checkpoint has them in, by their names in the model."""
    low = {matrix.tensor for matrix in listed if matrix.precision == "fp8"}
    read = model.state_dict()
    return {
        name: source.read(tensor)
        for tensor, name in names.items()
        # Experts that transformers stacks have the type of the whole, or `check` says so.
        if tensor not in low
        and read[name].shape == source.tensors[tensor].shape
        and str(read[name].dtype).removeprefix("torch.") != source.tensors[tensor].dtype
    }


def _write_configs(
    folder: Path, source: Path, quantization: tuple[dict[str, Any], dict[str, Any]], exclude: Sequence[str]
) -> None:
    """config.json and hf_quant_config.json: the checkpoint's and ModelOpt's, with the plan's modules outside FP8."""
    alone, inside = quantization
    alone["quantization"]["exclude_modules"] = list(exclude)
    (folder / QUANT_CONFIG).write_text(json.dumps(alone, indent=2) + "\n")
    config = {**read_json(source / CONFIG), "quantization_config": {**inside, "ignore": list(exclude)}}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def check(
    folder: Path, *, source: SafetensorsReader, listed: Sequence[Matrix], tensors: Collection[str]
) -> dict[str, dict[str, int]]:
    """Hold an exported folder against its checkpoint and the plan.

    Args:
        folder: that was written.
        source: the checkpoint.
        listed: its matrices with their precisions.
        tensors: all names of the checkpoint's tensors.

    Returns:
        Bytes `before` and `after` of the matrices of each precision, of `scales`, and of `others`.

    Raises:
        CheckpointError: a tensor is missing, of another precision than planned, or changed outside FP8.
    """
    import torch

    made = SafetensorsReader(folder)
    planned = {matrix.tensor: matrix.precision for matrix in listed}
    scales = {name for name in made.tensors if name.rpartition(".")[2] in SCALES}
    if wrong := sorted((made.tensors.keys() - scales) ^ set(tensors)):
        where = "is missing" if wrong[0] in tensors else "is not in the checkpoint that it was made from"
        raise CheckpointError(f"{folder}: {wrong[0]} {where} ({len(wrong)} such tensors)")
    sizes: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    with progress_of("checking", len(tensors), unit="tensors") as advance:
        for name, stored in made.tensors.items():
            tensor = made.read(name)
            kind = "scales" if name in scales else planned.get(name, "others")
            sizes["after"][kind] = sizes["after"].get(kind, 0) + tensor.nbytes
            if name in scales:
                continue
            own = source.read(name)
            sizes["before"][kind] = sizes["before"].get(kind, 0) + own.nbytes
            if kind == "fp8":
                scale = f"{name.removesuffix('.weight')}.weight_scale"
                if stored.dtype != FP8 or scale not in scales:
                    raise CheckpointError(f"{folder}: {name} is {stored.dtype}, the plan has it in FP8 with {scale}")
            elif stored != source.tensors[name] or not torch.equal(_bits(tensor), _bits(own)):
                raise CheckpointError(f"{folder}: {name} changed, and the plan leaves it as it was")
            advance(1)
    return sizes


def _bits(tensor: "Tensor") -> "Tensor":
    """The bytes, so that NaN equals itself."""
    import torch

    return tensor.contiguous().flatten().view(torch.uint8)
