"""A `data.custom_dataloader` for NeMo-RL, for curricula whose domains are separate datasets.

A single dataset whose records name their environment (NeMo-Gym's) does not need this module, as it can train on
`curriculum.jsonl` with `data.shuffle=false`. Datasets with different processors and environments have separate
dataloaders, and NeMo-RL (0.6 and later) calls a function for the next batch. `next_batch` draws a step's prompts from
these dataloaders in the curriculum's order, so that batches equal those of `curriculum.jsonl`.

The function is stateless: the position of the first prompt it draws determines the step. NeMo-RL saves the
dataloaders' positions in its checkpoints, so a resumed run continues with the next step.
"""

import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.data.curriculum.layout import DOMAINS, Order, read_order

VARIABLE = "NEMO_EXT_CURRICULUM"


def next_batch(
    data_iterators: dict[str, Iterator[Any]], dataloaders: Mapping[str, Any], **records: object
) -> tuple[Any, dict[str, Iterator[Any]]]:
    """Return the curriculum's next batch; called by NeMo-RL's `MultipleDataloaderWrapper`.

    The environment variable NEMO_EXT_CURRICULUM names the curriculum's directory. The config must set
    `data.use_multiple_dataloader=true data.num_prompts_per_dataloader=1 data.shuffle=false
    data.custom_dataloader=nemo_ext.rl.nemo_rl.curriculum.next_batch`, and list the files in `domains/` in `data.train`.

    Args:
        data_iterators: mapping from NeMo-RL's dataset names to their iterators.
        dataloaders, records: unused arguments that NeMo-RL passes.

    Returns:
        The batch (a BatchedDataDict) and the iterators.

    Raises:
        ValueError: the variable, the datasets or their settings do not match the curriculum, or all its steps are done.
    """
    directory = os.environ.get(VARIABLE)
    if not directory:
        raise ValueError(
            f"the environment variable {VARIABLE} is not set; set it to the curriculum's directory, which contains "
            f"the folder {DOMAINS}"
        )
    batches = draw_step(data_iterators, _order(directory))
    batched = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    return batched.from_batches(batches), data_iterators


def draw_step(data_iterators: Mapping[str, Iterator[Any]], order: Order) -> list[Any]:
    """Draw the single-prompt batches of the next step, in the curriculum's order.

    Args:
        data_iterators: mapping from NeMo-RL's dataset names to iterators; `domains/math.jsonl` is `domains-math`.

    Raises:
        ValueError: the datasets or their positions do not match the curriculum, or all its steps are done.
    """
    tasks = [f"{DOMAINS}-{name}" for name in order.names]
    if sorted(data_iterators) != sorted(tasks):
        raise ValueError(
            f"data.train has the datasets {sorted(data_iterators)}, but the curriculum requires {sorted(tasks)}; set "
            f"data.train to the files in the curriculum's folder {DOMAINS}"
        )
    steps = len(order.domain)
    first = next(data_iterators[tasks[order.anchor]], None)
    if first is None:
        raise ValueError(
            f"all {steps} steps of the curriculum are done; set grpo.max_num_steps={steps}, or make a longer curriculum"
        )
    position = _position(first)
    step = int(np.searchsorted(order.before[:, order.anchor], position))
    if step >= steps or order.before[step, order.anchor] != position:
        raise ValueError(
            f"the next prompt is number {position} of dataset {tasks[order.anchor]}, but no step of the curriculum "
            f"starts with it; set data.shuffle=false and grpo.num_prompts_per_step={order.domain.shape[1]}"
        )
    due = order.before[step].copy()
    drawn = {order.anchor: [first]}
    batches = []
    for domain in order.domain[step].tolist():
        waiting = drawn.get(domain)
        batch = waiting.pop() if waiting else next(data_iterators[tasks[domain]], None)
        if batch is None or _position(batch) != due[domain]:
            actual = "no more prompts" if batch is None else f"prompt {_position(batch)}"
            raise ValueError(
                f"step {step} requires prompt {due[domain]} of dataset {tasks[domain]}, but its dataloader has "
                f"{actual}; check that the files belong to the curriculum and that all dataloaders resumed from one "
                "checkpoint"
            )
        due[domain] += 1
        batches.append(batch)
    return batches


@functools.lru_cache(maxsize=1)
def _order(directory: str) -> Order:
    return read_order(Path(directory))


def _position(batch: Any) -> int:
    """Return the position of a single-prompt batch in its dataset; raise ValueError if it has several prompts."""
    positions = batch["idx"]
    if len(positions) != 1:
        raise ValueError(
            f"a dataloader returned {len(positions)} prompts, not 1; set data.num_prompts_per_dataloader=1"
        )
    return int(positions[0])
