"""Checks of a composed config before any rank starts: the layout in plain words first, then Megatron's own checks."""

import argparse
from collections.abc import Mapping
from typing import Any

from nemo_ext.architecture.blocks import NAMES, Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.megatron.arguments import (
    command_line,
    parse_arguments,
    pattern_with_cuts,
    quiet_imports,
    world_size,
)
from nemo_ext.megatron.cpu import patches


def check(config: Mapping[str, Any]) -> argparse.Namespace:
    """Megatron's validated arguments for the config.

    Raises:
        ValueError: for a layout that does not fit the model or the machine, an unknown or contradictory argument, a pattern
            that does not parse.
    """
    check_layout(config)
    with quiet_imports():
        patches.apply()
        try:
            return parse_arguments(command_line(config), world_size=world_size(config))
        finally:
            patches.restore()


def check_layout(config: Mapping[str, Any]) -> None:
    """Refuses a parallel layout that cannot hold the model.

    Raises:
        ValueError: naming the sizes that do not divide and what would.
    """
    megatron = config["megatron"]
    architecture = Architecture.from_config(config)

    def size(name: str) -> int:
        return int(megatron.get(f"{name}_parallel_size") or 1)

    tensor, pipeline = size("tensor_model"), size("pipeline_model")
    context, expert = size("context"), size("expert_model")
    ranks = world_size(config)
    if ranks % (tensor * pipeline * context):
        raise ValueError(
            f"{ranks} ranks (launcher.nodes x launcher.nproc_per_node) do not divide by tensor x pipeline x context = "
            f"{tensor} x {pipeline} x {context} = {tensor * pipeline * context}: change the layout or the number of ranks"
        )
    expert_tensor = int(megatron.get("expert_tensor_parallel_size") or tensor)
    if ranks % (expert_tensor * expert * pipeline):
        raise ValueError(
            f"{ranks} ranks do not divide by expert_tensor x expert x pipeline = {expert_tensor} x {expert} x {pipeline}: "
            "choose a smaller expert_model_parallel_size"
        )
    for number, block in enumerate(architecture.pattern.blocks, start=1):
        sizes = architecture.resolved(block, layer=number)
        for name, parts, what in _split(sizes, tensor, expert):
            total = sizes.get(name)
            if total and total % parts:
                raise ValueError(
                    f"block {number} ({NAMES[block.kind]}): {name}={total} does not divide by {what}={parts}; "
                    f"choose {what} among {', '.join(str(d) for d in range(1, total + 1) if total % d == 0 and d <= 64)}"
                )
    stages = len(parse(pattern_with_cuts(config)).cuts) + 1
    if stages % pipeline:
        raise ValueError(
            f"model.pattern has {stages} stages, which pipeline_model_parallel_size={pipeline} does not divide: write "
            f"{pipeline - 1} cuts `|` (or a multiple of {pipeline} stages), or none and let the cuts be computed"
        )
    batch, micro = int(megatron["global_batch_size"]), int(megatron["micro_batch_size"])
    data_parallel = ranks // (tensor * pipeline * context)
    if batch % (micro * data_parallel):
        raise ValueError(
            f"global_batch_size={batch} does not divide by micro_batch_size x data parallel = {micro} x {data_parallel}"
        )


def _split(block: Block, tensor: int, expert: int) -> list[tuple[str, int, str]]:
    """(value, number of parts, the argument that says so) for the sizes of a block that are split over ranks."""
    over_tensor, over_expert = (tensor, "tensor_model_parallel_size"), (expert, "expert_model_parallel_size")
    return {
        "*": [("heads", *over_tensor)],
        "-": [("ffn", *over_tensor)],
        "M": [("heads", *over_tensor), ("groups", *over_tensor)],
        "E": [("experts", *over_expert)],
    }.get(block.kind, [])
