"""Entry point of a rehearsed Puzzle stage: `python -m nemo_ext.rehearsal.puzzle_rank REQUEST.json RECORD.json`.

The stage's own functions run on a parent model of fake tensors, for as many steps as it takes to reach peak memory.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.puzzle.cost import block_costs
from nemo_ext.puzzle.settings import Batches, Settings, settings
from nemo_ext.puzzle.variants import KEEP, Variant, variants
from nemo_ext.rehearsal.rank import main, record_of
from nemo_ext.rehearsal.tracker import HOST, Tracker
from nemo_ext.rehearsal.world import fake_world, megatron_arguments

NOWHERE = Path(os.devnull) / "nothing"
FEW = 2
"""Number of calibration batches to run; tensors kept for the remaining ones are allocated."""


class _Enough(Exception):
    """Raised to end a stage whose further steps would repeat the last one."""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Inputs of the functions that rehearse a stage.

    Attributes:
        parent: parent model, on fake tensors.
        description: its description.
        variants: for each block, its variants.
        settings: settings of the compression.
        tracker: tracker of the rank.
        seq_length: sequence length.
        ranks: number of ranks.
    """

    parent: Any
    description: Description
    variants: Sequence[Sequence[Variant]]
    settings: Settings
    tracker: Tracker
    seq_length: int
    ranks: int

    def tokens(self, batch: int) -> torch.Tensor:
        return torch.zeros(batch, self.seq_length, dtype=torch.long)

    def batches(self, data: Batches) -> int:
        """Return the number of batches of `data` on the rank that has the most."""
        return ceil(ceil(data.sequences / data.batch) / self.ranks)

    def parameters(self, variant: Variant) -> float:
        return block_costs(self.description.architecture, variant.block, self.settings.serving)["parameters"]

    def layer(self, variant: Variant) -> torch.nn.Module | None:
        """Build a variant's layer with uninitialised weights, or return the parent's; None for a removed block."""
        if variant.block is None or variant.name == KEEP:
            return None if variant.block is None else self.parent.layers[variant.number]
        with self.tracker.during("forward", "variants"):
            return self.parent.fresh(variant.number, variant.block)


def rehearse(
    config: Mapping[str, Any], *, puzzle: Mapping[str, Any], stage: str, ranks: int, kernels: bool = True
) -> dict[str, Any]:
    """Rehearse one rank of a Puzzle stage: one step of `distill`, one or two batches of the other stages.

    Args:
        config: training config of the stage (`stage_config`), changed by `settings.rehearsed`.
        puzzle: the `puzzle` section of the job's config.
        stage: library, distill, score or compare.
        ranks: number of ranks.
        kernels: as in `rank.rehearse`.

    Returns:
        A record like that of `rank.rehearse`, without rank, micro-batches and checkpoint.
    """
    began, tracker = time.monotonic(), Tracker()
    tracker.kind = "temporary"
    with fake_world(0, ranks):
        megatron_arguments(config)
        from nemo_ext.rehearsal.kernels import stand_ins
        from nemo_ext.rehearsal.transformer_engine import transformer_engine

        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(tracker)
            stack.enter_context(stand_ins(tracker, kernels=kernels))
            if kernels:
                stack.enter_context(transformer_engine(tracker, config))
            parameters = run_stage(config, settings(puzzle), stage, ranks, tracker)
    return record_of(tracker, parameters=parameters, began=began, scale=1.0)


def run_stage(config: Mapping[str, Any], chosen: Settings, stage: str, ranks: int, tracker: Tracker) -> int:
    """Build the parent, run a part of a stage on it, and return the parent's parameter count.

    Args:
        config: training config of the stage.
        chosen: settings of the compression.
        stage: name of the stage, as in `rehearse`.
        ranks: number of ranks.
        tracker: tracker that records the run, entered by the caller.
    """
    from nemo_ext.blockwise.parent import Parent
    from nemo_ext.blockwise.sharded import OFFLOAD, share_out
    from nemo_ext.megatron.session import build_model

    with _alone():
        parent = Parent(*build_model(config, blocks=chosen.fsdp is None))
        if chosen.fsdp is not None:
            share_out(parent, chosen.fsdp)
        tracker.label((*parent.model.parameters(), *parent.model.buffers()), "weights")
        kind = HOST if chosen.fsdp == OFFLOAD else "weights"
        tracker.label((part for shared in parent.shared for part in shared.parts), kind)
        description = from_config(config)
        rank = _Rank(
            parent=parent,
            description=description,
            variants=variants(description.architecture, chosen.variants),
            settings=chosen,
            tracker=tracker,
            seq_length=int(config["megatron"]["seq_length"]),
            ranks=ranks,
        )
        tracker.forget_peak()
        with tracker.during("forward", "activations"):
            STAGES[stage](rank)
        tracker.stop()
    return sum(weight.numel() for weight in parent.model.parameters()) + sum(shared.numel for shared in parent.shared)


def _library(rank: _Rank) -> None:
    from nemo_ext.puzzle.stages.library import importance

    data = rank.settings.calibration
    importance(rank.parent, rank.description, [rank.tokens(data.batch) for _ in range(min(FEW, rank.batches(data)))])


def _distill(rank: _Rank) -> None:
    """Run two steps of the largest group of variants; the first creates the optimizers' states and is not counted."""
    from nemo_ext.puzzle.stages.block_inputs import BlockInputs
    from nemo_ext.puzzle.stages.distill import Library, train_group, trainable

    training, tracker = rank.settings.distill, rank.tracker
    every = trainable(rank.variants)
    groups = [every[start : start + training.together] for start in range(0, len(every), training.together)]
    group = max(
        reversed(groups), key=lambda each: sum(map(rank.parameters, each))
    )  # the last one runs most of the parent
    steps = 0

    def batches(first: int) -> Iterator[torch.Tensor]:
        nonlocal steps
        while True:
            steps += 1
            if steps == 2:
                tracker.forget_peak()
                tracker.flops.clear()
                tracker.collectives.clear()
            tracker.phase, tracker.kind = "forward", "activations"
            yield rank.tokens(training.batch // rank.ranks)

    def advance(count: int) -> None:
        if steps == 2:
            raise _Enough

    def updating(optimizer: Any, *_: Any) -> None:
        tracker.phase, tracker.kind = "optimizer", "temporary"
        masters = [each for group in optimizer.param_groups for each in group["params"]]
        tracker.label((each.grad for each in masters if each.grad is not None), "gradients")

    def updated(optimizer: Any, *_: Any) -> None:
        masters = [group["params"] for group in optimizer.param_groups]
        states = tree_iter((masters, list(optimizer.state.values())))
        tracker.label((state for state in states if isinstance(state, torch.Tensor)), "optimizer")
        tracker.phase, tracker.kind = "forward", "activations"

    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    class FreshLibrary(Library):
        def layer(self, parent: Any, variant: Variant) -> torch.nn.Module | None:
            return rank.layer(variant)

    class FakeInputs(BlockInputs):
        """Stand-in for block inputs in files: reading yields empty tensors, writing keeps the tensor in memory."""

        def has(self, number: int, steps: Iterable[int]) -> bool:
            return groups.index(group) > 0

        def read(self, number: int, steps: Iterable[int]) -> Iterator[torch.Tensor]:
            weight, size = next(rank.parent.model.parameters()), rank.description.architecture.hidden_size
            while True:
                yield torch.empty(rank.seq_length, training.batch // rank.ranks, size, dtype=weight.dtype)

        def write(self, number: int, step: int, hidden: torch.Tensor) -> None:
            self.kept = hidden

    library, inputs = FreshLibrary(NOWHERE), None if training.inputs is None else FakeInputs(NOWHERE)
    after = next((later[0].number for later in groups[groups.index(group) + 1 :]), None)
    hooks = [register_optimizer_step_pre_hook(updating), register_optimizer_step_post_hook(updated)]
    try:
        tracker.kind = "optimizer"
        short = replace(training, steps=3, save_interval=4)
        train_group(rank.parent, group, library, library, batches, short, NOWHERE, advance, inputs, after)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def _score(rank: _Rank) -> None:
    """Score the group of a block's variants that has the most parameters."""
    from nemo_ext.puzzle.stages.score import score_blocks

    data, hidden = rank.settings.calibration, rank.description.architecture.hidden_size
    count = rank.batches(data)
    run = min(FEW, count)
    # Block inputs and last hidden states of the batches that are not run.
    kept = [
        torch.empty(rank.seq_length, data.batch, hidden, dtype=next(rank.parent.model.parameters()).dtype)
        for _ in range(2 * (count - run))
    ]
    together = rank.settings.distill.together
    by_block = [[each[0], *sorted(each[1:], key=rank.parameters)[-together:]] for each in rank.variants]
    largest = max(by_block, key=lambda each: sum(map(rank.parameters, each)))
    score_blocks(rank.parent, [largest], rank.layer, [rank.tokens(data.batch) for _ in range(run)], NOWHERE)
    del kept


def _compare(rank: _Rank) -> None:
    """Run a child made of the largest variants, which bounds the memory of the stages `baselines` and `evaluate`."""
    from nemo_ext.blockwise.sharded import OFFLOAD
    from nemo_ext.puzzle.stages.evaluate import losses_of_rank

    replaced: dict[int, torch.nn.Module | None] = {}
    for number, block_variants in enumerate(rank.variants):
        if len(block_variants) == 1:
            continue
        layer = rank.layer(max(block_variants[1:], key=rank.parameters))
        if layer is not None and rank.parent.share is not None:
            kind = HOST if rank.settings.fsdp == OFFLOAD else "variants"
            rank.tracker.label(rank.parent.share(layer).parts, kind)
        replaced[number] = layer
    rank.tracker.forget_peak()
    data = rank.settings.evaluation
    losses_of_rank(rank.parent, [rank.tokens(data.batch) for _ in range(min(FEW, rank.batches(data)))], replaced)


STAGES: Mapping[str, Callable[[_Rank], None]] = {
    "library": _library,
    "distill": _distill,
    "score": _score,
    "compare": _compare,
}


@contextmanager
def _alone() -> Iterator[None]:
    """Context manager for a stage on a single rank, without file writes or agreement between ranks; Adam as on GPUs."""
    from nemo_ext.blockwise import data_parallel

    with ExitStack() as stack:
        for target, name, replacement in (
            (data_parallel, "agreed", lambda decide: decide()),
            (data_parallel, "written", lambda write, **_: None),
            (import_module("torch.optim.adam"), "_default_to_fused_or_foreach", lambda *_, **__: (False, True)),
        ):
            stack.enter_context(patch.object(target, name, replacement))
        yield


if __name__ == "__main__":
    main(rehearse)
