"""Checks of a composed config before any rank starts: the layout in plain words first, then Megatron's own checks."""

import argparse
from collections.abc import Mapping
from typing import Any

from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.layout import check_layout as check_blocks
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.megatron.arguments import (
    command_line,
    parse_arguments,
    pattern_with_cuts,
    quiet_imports,
    world_size,
)
from nemo_ext.megatron.cpu import mamba_modules, patches


def check(config: Mapping[str, Any]) -> argparse.Namespace:
    """Megatron's validated arguments for the config.

    Raises:
        ValueError: for a layout that does not fit the model or the machine, an unknown or contradictory argument, a
        pattern
            that does not parse.
    """
    check_layout(config)
    with quiet_imports():
        mamba_modules.install()
        with patches.applied():
            return parse_arguments(command_line(config), world_size=world_size(config))


def check_layout(config: Mapping[str, Any]) -> None:
    """Refuses a parallel layout or batch that cannot hold the model.

    Raises:
        ValueError: naming the sizes that do not divide.
    """
    megatron = config["megatron"]
    layout = Layout.from_config(config, world_size=world_size(config))
    check_blocks(Architecture.from_config(config), layout)
    stages, pipeline = len(parse(pattern_with_cuts(config)).stages), layout.pipeline_parallel
    if stages % pipeline:
        raise ValueError(
            f"model.pattern has {stages} stages, which pipeline_model_parallel_size={pipeline} does not divide: write "
            f"{pipeline - 1} cuts `|` (or a multiple of {pipeline} stages), or none and let the cuts be computed"
        )
    batch, micro = int(megatron["global_batch_size"]), layout.micro_batch_size
    if batch % (micro * layout.data_parallel):
        raise ValueError(
            f"global_batch_size={batch} does not divide by micro_batch_size x data parallel = "
            f"{micro} x {layout.data_parallel}"
        )
