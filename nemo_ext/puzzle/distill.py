"""Block-wise local distillation: every variant learns its parent block's output from the parent's own input.

One forward pass of the parent serves many variants: each sees the input that the parent's block saw, and is trained to
give what the block gave, alone, without a thought of what comes after (Puzzle, section 3.1; "decoupled": attention and
FFN variants apart). The loss is the mean squared error over the parent's own contribution,
|variant(x) - block(x)|^2 / |block(x) - x|^2, so 1 is what a no-op has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import torch
from torch import Tensor

from nemo_ext.megatron.session import take_tensors
from nemo_ext.puzzle.library import Library
from nemo_ext.puzzle.parent import Parent
from nemo_ext.puzzle.variants import KEEP, Variant


@dataclass(frozen=True, kw_only=True)
class Training:
    """How variants are trained.

    Attributes:
        steps: batches that each variant sees.
        lr: peak learning rate of AdamW, decayed to zero by a cosine after a short warm-up.
        together: most variants trained in one forward pass of the parent; bounds memory.
        clip: largest gradient norm of a variant.
    """

    steps: int = 200
    lr: float = 1e-3
    together: int = 16
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "together"):
            if getattr(self, name) < 1:
                raise ValueError(f"puzzle.distill.{name}={getattr(self, name)}: expected a positive number")
        if not self.lr > 0:
            raise ValueError(f"puzzle.distill.lr={self.lr}: expected a positive number")


@dataclass(frozen=True)
class Result:
    """How well a variant learnt its block.

    Attributes:
        block: 1-based number.
        variant: its name.
        first: normalised error of the initial weights on the first batch.
        last: mean over the last tenth of the steps.
    """

    block: int
    variant: str
    first: float
    last: float


def trainable(found: Sequence[Sequence[Variant]]) -> list[Variant]:
    """The variants that have weights of their own."""
    return [variant for each in found for variant in each if variant.block is not None and variant.name != KEEP]


def distill(
    parent: Parent,
    found: Sequence[Sequence[Variant]],
    library: Library,
    trained: Library,
    batches: Callable[[], Iterator[Tensor]],
    training: Training,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Result]:
    """Train every variant of `library` that is not in `trained` yet.

    Args:
        parent: the model.
        found: of `variants`.
        library: initial weights.
        trained: where trained weights go; a group of variants is written when its last step is done.
        batches: a fresh iterator over tokens `[batch, seq]`, of at least `training.steps` batches: every group of
            variants sees the same ones, so results do not depend on how they are grouped or interrupted.
        training: see `Training`.
        advance: told of every step of a group, times its variants.

    Raises:
        ValueError: too few batches.
    """
    todo = [variant for variant in trainable(found) if not trained.has(variant)]
    results = []
    for start in range(0, len(todo), training.together):
        group = todo[start : start + training.together]
        results += _train_group(parent, group, library, trained, batches(), training, advance)
    return results


def _train_group(
    parent: Parent,
    group: Sequence[Variant],
    library: Library,
    trained: Library,
    batches: Iterator[Tensor],
    training: Training,
    advance: Callable[[int], None],
) -> list[Result]:
    layers: list[Any] = [library.layer(parent, variant) for variant in group]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=training.lr, weight_decay=0.0) for layer in layers]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, _decay(training.steps)) for each in optimizers]
    errors: list[list[float]] = [[] for _ in group]
    for step in range(training.steps):
        tokens = next(batches, None)
        if tokens is None:
            raise ValueError(f"distillation wants {training.steps} batches, the data end after {step}")
        with torch.no_grad(), parent.recorded() as record:
            parent.logits(tokens)
        for at, variant in enumerate(group):
            error = _error(parent, variant, layers[at], *record[variant.number])
            optimizers[at].zero_grad()
            error.backward()
            torch.nn.utils.clip_grad_norm_(layers[at].parameters(), training.clip)
            optimizers[at].step()
            schedules[at].step()
            errors[at].append(error.item())
        advance(len(group))
    tail = max(1, training.steps // 10)
    results = []
    for variant, layer, seen in zip(group, layers, errors, strict=True):
        prefix = f"decoder.layers.{variant.number}."
        trained.write(variant, {name.removeprefix(prefix): t for name, t in take_tensors(layer, prefix).items()})
        results.append(Result(variant.number + 1, variant.name, seen[0], sum(seen[-tail:]) / tail))
    return results


def _error(parent: Parent, variant: Variant, layer: torch.nn.Module, hidden: Tensor, output: Tensor) -> Tensor:
    made = parent.block_output(variant.number, hidden, layer)
    scale = (output - hidden).float().square().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (made - output).float().square().mean() / scale


def _decay(steps: int) -> Callable[[int], float]:
    """A cosine to zero after a warm-up over a twentieth of the steps."""
    warm_up = max(1, steps // 20)
    return lambda step: min((step + 1) / warm_up, 0.5 * (1 + cos(pi * min(1.0, step / steps))))
