"""Block-wise local distillation: every variant learns its parent block's output from the parent's own input.

One forward pass of the parent serves many variants: each sees the input that the parent's block saw, and is trained to
reproduce the block's output by itself, regardless of later blocks (Puzzle, section 3.1; "decoupled": attention and
FFN variants apart). The loss is the mean squared error relative to the parent block's own contribution,
|variant(x) - block(x)|^2 / |block(x) - x|^2, so a no-op has a loss of 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent
from nemo_ext.megatron.session import take_tensors
from nemo_ext.puzzle.settings import Training
from nemo_ext.puzzle.stages.library import Library
from nemo_ext.puzzle.stages.shards import Shard
from nemo_ext.puzzle.variants import KEEP, Variant


@dataclass(frozen=True)
class Result:
    """Training result of a variant.

    Attributes:
        block: 1-based number of the block.
        variant: name of the variant.
        first: normalised error of the initial weights on the first batch.
        last: mean normalised error over the last tenth of the steps.
    """

    block: int
    variant: str
    first: float
    last: float


def trainable(found: Sequence[Sequence[Variant]]) -> list[Variant]:
    """Variants with weights of their own."""
    return [variant for each in found for variant in each if variant.block is not None and variant.name != KEEP]


def distill(
    parent: Parent,
    found: Sequence[Sequence[Variant]],
    library: Library,
    trained: Library,
    batches: Callable[[int], Iterator[Tensor]],
    training: Training,
    *,
    shard: Shard | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Result]:
    """Train every variant of `library` that is not in `trained` yet.

    Data parallel: every rank has its part of each batch, and gradients are averaged over ranks.

    Args:
        parent: the model.
        found: variants of each block, from `variants`.
        library: library of initial weights.
        trained: library of trained weights; a group of variants is written after its last step, and a checkpoint of the
            group in training every `training.save_interval` steps.
        batches: this rank's tokens `[batch, seq]` from the given step on; all groups of variants see the same ones, so
            results do not depend on grouping or interruptions.
        training: see `Training`.
        shard: shard that `found` belongs to, while others train theirs into the same library; its checkpoints have
            names of their own. Without one, checkpoints left by shards are resumed.
        advance: called for every step of a group with the number of its variants; also for steps already done.

    Returns:
        One result per trainable variant, in order.

    Raises:
        ValueError: there are too few batches, or a checkpoint is from another training.
    """
    every = {(variant.number, variant.name): variant for variant in trainable(found)}
    todo = data_parallel.agreed(lambda: [key for key, variant in every.items() if not trained.has(variant)])
    begun = data_parallel.agreed(lambda: _begun(trained, training, shard))
    for file in [file for file, keys in begun.items() if not {*keys} & {*todo}]:  # all of its variants are written
        del begun[file]
        data_parallel.written(file.unlink)
    interrupted = {key for keys in begun.values() for key in keys}
    advance((len(every) - len({*todo, *interrupted})) * training.steps)
    for file, keys in begun.items():
        train_group(parent, [every[key] for key in keys], library, trained, batches, training, file, advance)
    rest = [every[key] for key in todo if key not in interrupted]
    for start in range(0, len(rest), training.together):
        group = rest[start : start + training.together]
        train_group(parent, group, library, trained, batches, training, _checkpoint(trained, shard), advance)
    return results(found, trained)


def results(found: Sequence[Sequence[Variant]], trained: Library) -> list[Result]:
    """Training results of the trained variants, read from their files."""
    made = []
    for variant in trainable(found):
        notes = trained.notes(variant)
        made.append(Result(variant.number + 1, variant.name, float(notes["first"]), float(notes["last"])))
    return made


def train_group(
    parent: Parent,
    group: Sequence[Variant],
    library: Library,
    trained: Library,
    batches: Callable[[int], Iterator[Tensor]],
    training: Training,
    file: Path,
    advance: Callable[[int], None],
) -> None:
    """Trains variants side by side and writes them to `trained`; `file` is their checkpoint, others as of `distill`."""
    layers: list[Any] = [library.layer(parent, variant) for variant in group]
    weights = [list(layer.parameters()) for layer in layers]
    # The optimizer updates fp32 master weights; for a bf16 layer these are copies.
    masters = [[each.detach().float().requires_grad_() for each in own] for own in weights]
    optimizers = [torch.optim.AdamW(each, lr=training.lr, weight_decay=0.0) for each in masters]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, _decay(training.steps)) for each in optimizers]
    errors: list[list[float]] = [[] for _ in group]
    first = 0
    if file.is_file():
        state = torch.load(file, weights_only=True, map_location="cpu")
        first, errors = state["step"], state["errors"]
        for at in range(len(group)):
            _copy(state["masters"][at], masters[at])
            _copy(masters[at], weights[at])
            optimizers[at].load_state_dict(state["optimizers"][at])
            schedules[at].load_state_dict(state["schedules"][at])

    def save(step: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        torch.save(
            {
                "variants": [(variant.number, variant.name) for variant in group],
                "training": asdict(training),
                "step": step,
                "errors": errors,
                "masters": [[each.detach() for each in own] for own in masters],
                "optimizers": [each.state_dict() for each in optimizers],
                "schedules": [each.state_dict() for each in schedules],
            },
            unfinished,
        )
        unfinished.replace(file)

    advance(first * len(group))
    data, places = batches(first), sorted({variant.number for variant in group})
    for step in range(first, training.steps):
        tokens = next(data, None)
        if tokens is None:
            raise ValueError(f"distillation wants {training.steps} batches, the data end after {step}")
        with torch.no_grad(), parent.recorded(places) as record:
            parent.run_to(places[-1], tokens)
        for at, variant in enumerate(group):
            error = _error(parent, variant, layers[at], *record[places.index(variant.number)])
            gradients = torch.autograd.grad(error, weights[at], allow_unused=True)
            for master, weight, gradient in zip(masters[at], weights[at], gradients, strict=True):
                master.grad = torch.zeros_like(weight).float() if gradient is None else gradient.float()
            data_parallel.average_gradients(masters[at])
            torch.nn.utils.clip_grad_norm_(masters[at], training.clip)
            optimizers[at].step()
            schedules[at].step()
            _copy(masters[at], weights[at])
            errors[at].append((data_parallel.summed(error.detach()) / data_parallel.count()).item())
        if (step + 1) % training.save_interval == 0 or step + 1 == training.steps:
            data_parallel.written(partial(save, step + 1))
        advance(len(group))
    tail = max(1, training.steps // 10)

    def write() -> None:
        for variant, layer, seen in zip(group, layers, errors, strict=True):
            prefix = _prefix(variant)
            made = {name.removeprefix(prefix): tensor.cpu() for name, tensor in take_tensors(layer, prefix).items()}
            trained.write(variant, made, first=repr(seen[0]), last=repr(sum(seen[-tail:]) / tail))
        file.unlink()

    data_parallel.written(write)


def _copy(given: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for one, other in zip(given, to, strict=True):
            other.copy_(one)


def _checkpoint(trained: Library, shard: Shard | None) -> Path:
    return trained.folder / ("in_training.pt" if shard is None else f"in_training_{shard.label}.pt")


def _prefix(variant: Variant) -> str:
    return f"decoder.layers.{variant.number}."


def _begun(trained: Library, training: Training, shard: Shard | None) -> dict[Path, list[tuple[int, str]]]:
    """Groups whose training was interrupted, by checkpoint; some of their files may already be written."""
    every = [_checkpoint(trained, shard)] if shard else sorted(trained.folder.glob("in_training*.pt"))
    begun = {}
    for file in every:
        if not file.is_file():
            continue
        state = torch.load(file, weights_only=True, map_location="cpu")
        if state["training"] != asdict(training):
            raise ValueError(f"{file} is of another training ({state['training']}): remove it, or train as it says")
        begun[file] = [(number, name) for number, name in state["variants"]]
    return begun


def _error(parent: Parent, variant: Variant, layer: torch.nn.Module, hidden: Tensor, output: Tensor) -> Tensor:
    made = parent.block_output(variant.number, hidden, layer)
    scale = data_parallel.summed((output - hidden).float().square().mean()) / data_parallel.count()
    return (made - output).float().square().mean() / scale.clamp_min(torch.finfo(torch.float32).tiny)


def _decay(steps: int) -> Callable[[int], float]:
    """Cosine decay to zero after a warm-up over a twentieth of the steps."""
    warm_up = max(1, steps // 20)
    return lambda step: min((step + 1) / warm_up, 0.5 * (1 + cos(pi * min(1.0, step / steps))))
