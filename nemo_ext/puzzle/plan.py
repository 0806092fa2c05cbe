"""Estimates of the total work of a compression's stages: FLOPs, and bytes moved and written. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from nemo_ext.architecture import cost
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.gpus import Gpu
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.precision import bytes_per_number
from nemo_ext.puzzle.settings import Settings
from nemo_ext.puzzle.variants import KEEP, Variant

FP32 = 4
REACHED = 0.4
"""Assumed fraction of the peak FLOP/s and of the peak link bandwidth (choice)."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Total work of one stage.

    Attributes:
        flops: FLOPs of all ranks together.
        gathered_bytes: bytes that each rank receives from other ranks: blocks of a sharded parent, gradients and
            weights of variants.
        host_bytes: bytes that each rank copies from host memory.
        written_bytes: bytes of weights written to disk.
        passing_bytes: bytes of temporary files read and written by all ranks: block inputs and variants' checkpoints.
        held_bytes: maximum bytes of block inputs on disk at any time.
    """

    stage: str
    flops: float
    gathered_bytes: float
    host_bytes: float
    written_bytes: float
    passing_bytes: float = 0.0
    held_bytes: float = 0.0

    def hours(self, gpu: Gpu, ranks: int, nodes: int = 1) -> float:
        """Estimate the stage's hours on `ranks` GPUs on `nodes` nodes: time to compute plus time to move data.

        Every rate is assumed to be the fraction `REACHED` of the GPU's peak rate.
        """
        # NCCL's rings use all network adapters of a node.
        link = gpu.nvlink if nodes == 1 else min(gpu.nvlink, gpu.network * ranks / nodes)
        seconds = self.flops / ranks / gpu.flops + self.gathered_bytes / link + self.host_bytes / gpu.host
        return seconds / REACHED / 3600


def stage_work(
    architecture: Architecture,
    by_block: Sequence[Sequence[Variant]],
    chosen: Settings,
    *,
    seq_length: int,
    ranks: int,
    precision: str = "bf16",
) -> list[StageWork]:
    """Estimate the work of library, distill and score; other stages only run a few passes over the evaluation set.

    Args:
        by_block: variants of each block, from `variants`.
        seq_length: tokens per sequence.
        precision: precision of the parent and of written weights.
    """
    blocks = [_forward(architecture, each[0].block, seq_length) for each in by_block]
    head = cost.head_forward_flops_per_token(architecture)
    every = [variant for each in by_block for variant in each]
    trainable = [variant for variant in every if variant.block is not None and variant.name != KEEP]
    size = bytes_per_number(precision)
    stored = size * sum(_parameters(architecture, variant.block) for variant in trainable)
    weights = [size * _parameters(architecture, each[0].block) for each in by_block]

    def work(stage: str, flops: float, passed: float, written: float, sent: float = 0.0) -> StageWork:
        """Return the work of a stage for this parent, number of ranks and sharding.

        Args:
            flops: FLOPs of all ranks together.
            passed: bytes of the parent's weights that a rank's passes use, counted once per pass.
            written: bytes of weights written to disk.
            sent: bytes of variants' gradients and weights that ranks exchange.
        """
        return StageWork(
            stage=stage,
            flops=flops,
            gathered_bytes=(sent + (0.0 if chosen.fsdp is None else passed)) * (ranks - 1) / ranks,
            host_bytes=passed / ranks if chosen.fsdp == "offload" else 0.0,
            written_bytes=written,
        )

    calibrated = float(chosen.calibration.sequences * seq_length)
    batches = chosen.calibration.sequences / chosen.calibration.batch / ranks
    initial = {(variant.number, variant.weights): variant.block for variant in trainable}
    stored_initially = size * sum(_parameters(architecture, block) for block in initial.values())
    library = work("library", calibrated * sum(blocks), sum(weights) * (batches + 1), stored_initially)
    training = chosen.distill
    groups = [trainable[start : start + training.together] for start in range(0, len(trainable), training.together)]
    starts = [group[0].number for group in groups]
    # A group runs the parent up to its last block; with inputs from its first block to the next group's.
    runs = [range(group[-1].number + 1) for group in groups]
    read = written = 0
    if training.inputs is not None and groups:
        runs = [range(a, max(run.stop, b)) for a, run, b in zip([0, *starts[1:]], runs, [*starts[1:], 0], strict=True)]
        read, written = len(groups) - 1, len({*starts[1:]})
    inputs = size * training.batch * seq_length * architecture.hidden_size
    trained = sum(_forward(architecture, variant.block, seq_length) for variant in trainable)
    parameters = sum(_parameters(architecture, variant.block) for variant in trainable)
    saved = ceil(training.steps / training.save_interval) * 3 * FP32 * parameters
    distill = work(
        "distill",
        training.steps * training.batch * seq_length * (sum(blocks[n] for run in runs for n in run) + 3 * trained),
        training.steps * sum(weights[n] for run in runs for n in run),
        stored if training.steps else 0.0,
        training.steps * (FP32 + size) * parameters,  # reduce-scatter of gradients, all-gather of weights
    )
    distill = replace(
        distill,
        passing_bytes=(read + written) * training.steps * inputs + saved,
        held_bytes=inputs * (training.steps + min(training.save_interval, training.steps)) if written else 0.0,
    )
    flops, gathered = sum(blocks), sum(weights)  # of a pass for block inputs and the last hidden states
    for number, each in enumerate(by_block):
        later = sum(blocks[number + 1 :]) + head
        flops += blocks[number] + head + sum(_forward(architecture, v.block, seq_length) + later for v in each)
        gathered += weights[number] + ceil(len(each) / training.together) * sum(weights[number + 1 :])
    # Inputs of the next block are computed for all batches at once.
    return [library, distill, work("score", calibrated * flops, gathered * batches + sum(weights), 0.0)]


def _alone(architecture: Architecture, block: Block) -> Architecture:
    return architecture.with_pattern(Pattern((block,)))


def _forward(architecture: Architecture, block: Block | None, seq_length: int) -> float:
    """Return the forward FLOPs per token of a block in sequences of `seq_length` tokens; 0 for a no-op."""
    if block is None:
        return 0.0
    return cost.block_forward_flops_per_token(_alone(architecture, block), 1, seq_length=seq_length)


def _parameters(architecture: Architecture, block: Block | None) -> int:
    return 0 if block is None else cost.block_parameters(_alone(architecture, block), 1).total
