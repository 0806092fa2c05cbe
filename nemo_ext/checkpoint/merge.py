"""The job `merge`: averages checkpoints, as a weighted soup of several or at points on the line between two.

    checkpoints -> check that the models match -> average per tensor -> shards -> folder, renamed at the end

A soup of a run's last checkpoints, or of runs that differ in data order, is often better than any of them
(arXiv:2203.05482; OLMo 3 averages its mid-training runs). To find the best point between two checkpoints,
evaluate several. Values on which all checkpoints agree are kept bit for bit.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.checkpoint.beside import copy_extras, extras_beside, keep_extras, write_model_file
from nemo_ext.checkpoint.description import to_config
from nemo_ext.checkpoint.hf import DEFAULT_SHARD
from nemo_ext.checkpoint.output import check_room, folder_to_make, unfinished
from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.safetensors_files import SafetensorsReader
from nemo_ext.checkpoint.same_model import (
    Checkpoint,
    Model,
    check_same_hugging_face,
    check_same_megatron,
    open_checkpoints,
)
from nemo_ext.checkpoint.storage import CheckpointError, Stored, check_finite, size_in_bytes
from nemo_ext.checkpoint.torch_dist import TorchDistReader
from nemo_ext.checkpoint.writing import HUGGING_FACE, MEGATRON, Slot, Work, cut_into_parts, write_checkpoint
from nemo_ext.job.progress import notice

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6
"""Allowed deviation of the weights' sum from 1; weights within it are normalised."""
_LARGEST = 1e30  # largest weight, so that its float is finite
TOKENIZER = "tokenizer.json"
CHUNK = 1 << 20
"""Number of elements averaged at a time, which limits temporary memory to a few megabytes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """User settings of an average, apart from the checkpoints, described in hydra_conf/merge.yaml.

    Raises:
        ValueError: a setting is invalid; names it.
    """

    weights: Sequence[float] | None = None
    points: Sequence[float] | None = None
    iterations: Sequence[int | None] | None = None
    shard_gigabytes: float = DEFAULT_SHARD
    check_finite: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        if self.weights is not None and self.points is not None:
            raise ValueError("weights and points are both set: remove one of them, as points define the weights")
        for name, numbers in (("weights", self.weights), ("points", self.points)):
            if numbers is not None and not (_is_list(numbers) and numbers and all(map(_is_number, numbers))):
                raise ValueError(f"{name}={_shown(numbers)}: expected a list of finite numbers, such as [0.25,0.75]")
        if self.iterations is not None and not (_is_list(self.iterations) and all(map(_is_iteration, self.iterations))):
            raise ValueError(f"iterations={_shown(self.iterations)}: expected a list of whole numbers or nulls")
        if not (_is_number(self.shard_gigabytes) and self.shard_gigabytes > 0):
            raise ValueError(f"shard_gigabytes={self.shard_gigabytes}: expected a positive number")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_iteration(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _shown(values: object) -> str:
    """Format a list in command line syntax; other values as `str` does."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return str(values)
    return "[" + ",".join(f"{v:.9g}" if isinstance(v, float) else "null" if v is None else str(v) for v in values) + "]"


@dataclass(frozen=True)
class Target:
    """Checkpoint to write.

    Attributes:
        weights: weight of each source checkpoint in the average; they sum to 1.
    """

    to: Path
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked average that has not written anything yet.

    Attributes:
        checkpoints: checkpoints to average.
        targets: checkpoints to write: one in total, or one per point.
        settings: user settings.
        finish: function that adds all files except tensors to a target's folder.
        arguments: arguments for Megatron's loader (see `megatron_arguments`).
        remarks: notes for the user.
    """

    checkpoints: Sequence[Checkpoint]
    targets: Sequence[Target]
    settings: Settings
    finish: Callable[[Path, Target], None]
    arguments: Mapping[str, Any]
    remarks: Sequence[str]

    @property
    def to_format(self) -> str:
        """Format of the sources and targets, `huggingface` or `megatron`."""
        return HUGGING_FACE if isinstance(self.checkpoints[0].reader, SafetensorsReader) else MEGATRON

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Mapping from tensor name to shape and type, which all sources and targets share."""
        return self.checkpoints[0].reader.tensors

    @property
    def bytes(self) -> int:
        """Total size of one target's tensors in bytes."""
        return sum(size_in_bytes(stored.shape, stored.dtype) for stored in self.tensors.values())


def plan(sources: Sequence[Path], to: Path, settings: Settings) -> Plan:
    """Open the checkpoints, check that they hold the same model, and plan the targets.

    Args:
        sources: Hugging Face folders, or Megatron run directories, checkpoints directories or checkpoints.
        to: target folder; if points are set, the parent of the target folders.

    Raises:
        ValueError: weights or points are invalid, or the checkpoints are corrupt or hold different models.
    """
    if len(sources) < 2:
        raise ValueError(f"from={_shown(sources)}: expected at least two checkpoints, such as 'from=[a,b]'")
    targets = _targets(len(sources), to, settings)
    checkpoints = open_checkpoints(sources, settings.iterations)
    if isinstance(checkpoints[0].reader, SafetensorsReader):
        finish, remarks = _hugging_face(checkpoints)
        arguments: Mapping[str, Any] = {}
    else:
        model = check_same_megatron(checkpoints)
        finish, remarks = _megatron(checkpoints, model)
        arguments = model.arguments
    return Plan(
        checkpoints=checkpoints,
        targets=targets,
        settings=settings,
        finish=finish,
        arguments=arguments,
        remarks=[*_odd(checkpoints, targets), *remarks],
    )


def _targets(count: int, to: Path, settings: Settings) -> list[Target]:
    """Targets to write from `count` source checkpoints."""
    if settings.points is None:
        return [Target(to, _normalised(settings.weights or [1 / count] * count, count))]
    if count != 2:
        raise ValueError(
            f"points={_shown(settings.points)} requires exactly two checkpoints, but `from` lists {count}: set weights "
            "instead"
        )
    points = {f"t{point + 0.0:g}": float(point) for point in settings.points}  # + 0.0 turns -0 into 0
    if len(points) < len(settings.points):
        raise ValueError(
            f"points={_shown(settings.points)}: some points share a folder ({', '.join(points)}): remove duplicates"
        )
    return [Target(to / name, (1 - point, point)) for name, point in points.items()]


def _normalised(weights: Sequence[float], count: int) -> tuple[float, ...]:
    if len(weights) != count:
        raise ValueError(
            f"weights={_shown(weights)} has {len(weights)} weights for {count} checkpoints: give one per checkpoint"
        )
    total = sum(weights)
    if not abs(total - 1) <= TOLERANCE:
        normalised = [weight / total for weight in weights] if isfinite(total) and total > 0 else None
        hint = f"; did you mean weights={_shown(normalised)}?" if normalised else ""
        raise ValueError(f"weights={_shown(weights)} must sum to 1, not {total:.9g}{hint}")
    return tuple(weight / total for weight in weights)


def _odd(checkpoints: Sequence[Checkpoint], targets: Sequence[Target]) -> list[str]:
    """Warnings about settings that are allowed but may be mistakes."""
    paths = [str(checkpoint.path.resolve()) for checkpoint in checkpoints]
    twice = [path for path in dict.fromkeys(paths) if paths.count(path) > 1]
    negative = [target for target in targets if min(target.weights) < 0]
    return [
        *(f"{path} is listed {paths.count(path)} times" for path in twice),
        *(f"{target.to}: weights {_shown(target.weights)} extrapolate, as one is negative" for target in negative),
    ]


Finish = Callable[[Path, Target], None]


def _hugging_face(checkpoints: Sequence[Checkpoint]) -> tuple[Finish, list[str]]:
    """Return a function that adds all files except tensors to a target's folder, and remarks for the user.

    Raises:
        CheckpointError: the config.json files describe different models.
    """
    first, *others = checkpoints
    for other in others:
        check_same_hugging_face(first, other)

    def finish(folder: Path, target: Target) -> None:
        copy_extras(first.path, folder, code=True)

    ours, theirs = first.path / TOKENIZER, [file for other in others if (file := other.path / TOKENIZER).is_file()]
    unlike = [file for file in theirs if ours.is_file() and not filecmp.cmp(ours, file, shallow=False)]
    return finish, [f"{file} differs from the tokenizer of {first.path}, which is used" for file in unlike]


def _megatron(checkpoints: Sequence[Checkpoint], model: Model) -> tuple[Finish, list[str]]:
    """Return a function that adds all files except tensors to a target's folder, and remarks for the user."""
    first, remarks = checkpoints[0], list(model.remarks)
    extras = extras_beside(first.source, first.path)
    assert isinstance(first.reader, TorchDistReader)
    if first.reader.left_out:
        remarks.append(f"{first.reader.left_out} optimizer state tensors are dropped: they cannot be averaged")

    def finish(folder: Path, target: Target) -> None:
        if model.description is not None:
            sections = to_config(model.description)
            shares = (f"{w:g} {c.path}" for w, c in zip(target.weights, checkpoints, strict=True))
            write_model_file(folder, sections, name=target.to.name, comment=f"Made from {' + '.join(shares)}.")
        keep_extras(extras, folder)

    return finish, remarks


def average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute a weighted sum of tensors, in fp64 for fp32 and fp64 tensors and in fp32 for others.

    Elements on which all tensors agree are kept bit for bit.

    Args:
        weights: weight of each tensor; they sum to 1.

    Returns:
        Average, of the same shape and type.
    """
    import torch

    first = tensors[0]
    wide = torch.float64 if first.dtype in (torch.float32, torch.float64) else torch.float32
    result = torch.empty(first.shape, dtype=first.dtype)
    for part, *parts in zip(*(t.reshape(-1).split(CHUNK) for t in (result, *tensors)), strict=True):
        total = parts[0].to(wide) * weights[0]
        agree = torch.ones(part.shape, dtype=torch.bool)
        for other, weight in zip(parts[1:], weights[1:], strict=True):
            total.add_(other.to(wide), alpha=weight)
            agree &= other == parts[0]
        torch.where(agree, parts[0], total.to(first.dtype), out=part)
    return result


def _work(plan: Plan, target: Target, name: str) -> Work:
    """Create the work item that averages the tensor `name`; checkpoints of weight 0 are not read.

    If only one checkpoint has a nonzero weight, its tensor is copied.
    """
    stored = plan.tensors[name]
    pairs = zip(plan.checkpoints, target.weights, strict=True)
    used = [(checkpoint, weight) for checkpoint, weight in pairs if weight != 0]

    def make() -> Sequence[Tensor]:
        tensors = []
        for checkpoint, _ in used:
            tensors.append(checkpoint.reader.read(name))
            if plan.settings.check_finite:
                check_finite(f"{checkpoint.path}: {name}", tensors[-1])
        return tensors if len(tensors) == 1 else [average(tensors, [weight for _, weight in used])]

    return Work((Slot(Piece.from_shape(name, *stored.shape), stored.dtype),), make)


def merge(plan: Plan, *, progress: bool = True) -> list[Path]:
    """Carry out a plan; the same call resumes after an interruption.

    Returns:
        The target folders.

    Raises:
        CheckpointError: a source changed while it was being read, or a target cannot be written (see
            `write_checkpoint`).
    """
    new = [target for target in plan.targets if not target.to.exists() and not unfinished(target.to).exists()]
    if new:
        check_room(new[0].to, plan.bytes * len(new))
    return [_make(plan, target, progress=progress) for target in plan.targets]


def _make(plan: Plan, target: Target, *, progress: bool) -> Path:
    def identities() -> list[list[object]]:
        return [checkpoint.identity() for checkpoint in plan.checkpoints]

    began_with = identities()

    def finish(folder: Path) -> None:
        if identities() != began_with:
            raise CheckpointError(
                f"to={target.to}: a source changed while it was being read; run the same command again when all are "
                "complete"
            )
        plan.finish(folder, target)

    return write_checkpoint(
        target.to,
        plan.to_format,
        cut_into_parts([_work(plan, target, name) for name in plan.tensors], plan.settings.shard_gigabytes),
        identity={"average_of": began_with, "weights": target.weights},
        finish=finish,
        arguments=plan.arguments,
        finite=plan.settings.check_finite,
        verify=plan.settings.verify,
        progress=progress,
    )


def table(plan: Plan) -> str:
    """Table of all tensors with types and shapes, followed by each target's weights and the totals."""
    width = max(map(len, plan.tensors), default=0)
    lines = [f"{name:<{width}}  {stored.dtype:<8}  {list(stored.shape)}" for name, stored in plan.tensors.items()]
    for target in plan.targets:
        shares = zip(target.weights, plan.checkpoints, strict=True)
        lines += ["", f"{target.to}:", *(f"  {weight:<8.6g}  {checkpoint.path}" for weight, checkpoint in shares)]
    each = " each" if len(plan.targets) > 1 else ""
    return "\n".join([*lines, "", f"{len(plan.tensors)} tensors, {plan.bytes / 1e9:,.3f} GB{each}; nothing written"])


def run(config: Mapping[str, Any]) -> None:
    """Run the job `merge`: check everything, then write the averages, or only print the plan if `dry_run` is true.

    Raises:
        ValueError: a setting is invalid, or a checkpoint cannot be read or written.
    """
    for key in ("check_finite", "verify", "dry_run"):
        if not isinstance(config[key], bool):
            raise ValueError(f"{key}={config[key]!r}: expected true or false")
    if not config["to"]:
        raise ValueError(f"to={config['to']!r}: expected the path of the target folder")
    named = config["from"] if _is_list(config["from"]) else [config["from"]]
    keys = ("weights", "points", "iterations", "shard_gigabytes", "check_finite", "verify")
    settings = Settings(**{key: config[key] for key in keys})
    planned = plan([Path(str(path)) for path in named if path], folder_to_make(Path(str(config["to"]))), settings)
    for remark in planned.remarks:
        notice(f"note: {remark}")
    if config["dry_run"]:
        print(table(planned))
        return
    for folder in merge(planned):
        notice(f"done: {folder}: {len(planned.tensors)} tensors, {planned.bytes / 1e9:,.3f} GB")
