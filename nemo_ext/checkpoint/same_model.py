"""Opening of several checkpoints, with checks that their tensors and configs are of the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.beside import config_beside, is_hugging_face, read_json
from nemo_ext.checkpoint.description import Description, differences, from_config, megatron_arguments
from nemo_ext.checkpoint.formats import read
from nemo_ext.checkpoint.safetensors_files import CONFIG, SafetensorsReader
from nemo_ext.checkpoint.storage import NO_TYPE, WEIGHT_TYPES, CheckpointError, fingerprint, listed, refuse_any
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder

NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""The config.json keys that may differ between checkpoints of one model."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One of several checkpoints of a model.

    Attributes:
        source: path that the user named: a Hugging Face folder, run directory, checkpoints directory or checkpoint.
        reader: reader of its tensors.
    """

    source: Path
    reader: SafetensorsReader | TorchDistReader

    @property
    def path(self) -> Path:
        """Folder with the tensors."""
        return self.reader.path

    def identity(self) -> list[object]:
        """Path and fingerprint of the checkpoint, as JSON values."""
        return [str(self.path.resolve()), fingerprint(self.reader)]


def open_checkpoints(sources: Sequence[Path], iterations: Sequence[int | None] | None) -> list[Checkpoint]:
    """Open checkpoints, and check that they hold the same tensors.

    Args:
        sources: either Hugging Face folders, or Megatron run directories, checkpoints directories or checkpoints.
        iterations: iteration to read from each Megatron run; None, or None in the list, for the newest.

    Raises:
        ValueError: a checkpoint is missing or corrupt, the formats are mixed, or tensors differ in name, shape or type.
    """
    for source in sources:
        if not source.is_dir():
            raise CheckpointError(f"from={source}: expected the folder of an existing checkpoint or run")
    is_hf = [is_hugging_face(source) for source in sources]
    if any(is_hf) and not all(is_hf):
        raise ValueError(
            f"from: {sources[is_hf.index(True)]} is a Hugging Face checkpoint, but {sources[is_hf.index(False)]} is "
            "not: convert them to one format with `nemo-ext convert` first"
        )
    if iterations is not None and all(is_hf):
        raise ValueError(f"iterations={list(iterations)} applies to Megatron checkpoints only: remove it")
    wanted = iterations or [None] * len(sources)
    if len(wanted) != len(sources):
        raise ValueError(
            f"iterations has {len(wanted)} entries for {len(sources)} checkpoints: give one per checkpoint"
        )
    opened = [
        Checkpoint(source=source, reader=SafetensorsReader(source) if all(is_hf) else _megatron(source, iteration))
        for source, iteration in zip(sources, wanted, strict=True)
    ]
    for other in opened[1:]:
        _check_same_tensors(opened[0], other)
    stored = opened[0].reader.tensors.items()
    types = [f"{name} is {tensor.dtype}" for name, tensor in stored if tensor.dtype not in WEIGHT_TYPES]
    refuse_any(f"{opened[0].path}: ", (NO_TYPE, types))
    return opened


def _megatron(source: Path, iteration: int | None) -> TorchDistReader:
    folder = checkpoint_folder(source, iteration)
    if iteration is not None and folder.name != f"iter_{iteration:07d}":
        raise ValueError(
            f"iterations: {source} is a single checkpoint, not a run with iteration {iteration}: set its entry to null"
        )
    return TorchDistReader(folder)


def _check_same_tensors(first: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = first.reader.tensors, other.reader.tensors
    common = [(name, ours[name], theirs[name]) for name in ours if name in theirs]
    shapes = [f"{name} is {list(b.shape)}, not {list(a.shape)}" for name, a, b in common if a.shape != b.shape]
    types = [f"{name} is {b.dtype}, not {a.dtype}" for name, a, b in common if a.dtype != b.dtype]
    problems = (
        ("missing", [name for name in ours if name not in theirs]),
        ("additional", [name for name in theirs if name not in ours]),
        ("of a different shape", shapes),
        ("of a different type", types),
    )
    differing = ours.keys() ^ theirs.keys()
    if differing and all(name.startswith("mtp.") for name in differing):
        raise CheckpointError(
            f"{other.path} and {first.path} do not have the same multi-token prediction ({listed(sorted(differing))}): "
            "convert the checkpoints that have it with mtp=drop"
        )
    refuse_any(f"{other.path} does not hold the same tensors as {first.path}, so they cannot be averaged: ", *problems)


@dataclass(frozen=True)
class Model:
    """Model shared by several checkpoints.

    Attributes:
        description: description of the model; None if our checkpoint formats cannot describe it.
        arguments: arguments for Megatron's loader (see `megatron_arguments`).
        remarks: notes for the user.
    """

    description: Description | None
    arguments: Mapping[str, Any]
    remarks: Sequence[str]


def check_same_hugging_face(first: Checkpoint, other: Checkpoint) -> None:
    """Check that two checkpoints' config.json describe the same model; unsupported formats are compared key by key.

    Raises:
        CheckpointError: they describe different models; names the settings that differ.
    """
    differing = _different_keys(read_json(first.path / CONFIG), read_json(other.path / CONFIG))
    if differing:
        raise CheckpointError(
            f"{other.path} holds a different model than {first.path} ({CONFIG}: {', '.join(differing)}): average only "
            "checkpoints of one model"
        )


def _different_keys(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    try:
        (one, ours), (another, theirs) = read(first), read(other)
    except ValueError:
        keys = sorted((first.keys() | other.keys()) - set(NOT_THE_MODEL))
        return [f"{key}={other.get(key)!r}, not {first.get(key)!r}" for key in keys if other.get(key) != first.get(key)]
    if one is not another:
        return [f"architectures={another.architecture}, not {one.architecture}"]
    return list(differences(theirs, ours))


def check_same_megatron(checkpoints: Sequence[Checkpoint]) -> Model:
    """Check that the configs next to several Megatron checkpoints describe the same model, and return it.

    Raises:
        CheckpointError: they describe different models (names the settings that differ), or no config defines the
            blocks.
    """
    configs = [(checkpoint, config_beside(checkpoint.source, checkpoint.path)) for checkpoint in checkpoints]
    described: list[tuple[Path, Description]] = []
    remarks = []
    for checkpoint, config in configs:
        try:
            if config is None:
                raise ValueError("there is no config next to it")
            described.append((checkpoint.path, from_config(config)))
        except ValueError as reason:
            remarks.append(
                f"{checkpoint.path}: only names, shapes and types are compared, as its config cannot be used ({reason})"
            )
    for path, description in described[1:]:
        differing = differences(description, described[0][1])
        if differing:
            raise CheckpointError(
                f"{path} and {described[0][0]} are different models, as their configs differ in "
                f"{', '.join(differing)}: average only checkpoints of one model"
            )
    if described:
        return Model(described[0][1], megatron_arguments(described[0][1].architecture), remarks)
    config = next((config for _, config in configs if config is not None), None)
    if config is None:
        raise CheckpointError(
            f"{checkpoints[0].path}: Megatron cannot load the average without the kinds of its blocks, and no config "
            "defines them: put the run's config.yaml or the model's model/NAME.yaml next to the checkpoint"
        )
    remarks.append("no model file is written: name the model as in the original run")
    # Not `from_config`: our formats cannot describe this model, but Megatron can still load it.
    return Model(None, megatron_arguments(Architecture.from_config(config)), remarks)
