"""Phases (see `nemo_ext.data.phases`) in Megatron's trainer: each phase's data, and a learning rate by tokens."""

import argparse
import bisect
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import get_args, training
from megatron.training.utils import get_blend_and_blend_per_split
from torch.utils.data import Dataset

from nemo_ext.data.blends.blend import shares_of
from nemo_ext.data.phases import Phase, Plan, drawn_before
from nemo_ext.megatron.forward_step import build_datasets


class TokenSchedule(OptimizerParamScheduler):
    """Megatron's learning rate schedule, based on tokens, for runs whose sequence length and batch size change.

    Megatron counts samples, so its formulas get the equivalent number of samples of the run's own sequence length.

    Args:
        optimizer: see OptimizerParamScheduler.
        plan: plan of the phases.
        whole: flags of the whole run, including `nemo_ext.data.phases.SCHEDULE`.
        others: see OptimizerParamScheduler; lengths in samples are replaced.
    """

    num_steps: Any
    max_lr: float

    def __init__(self, optimizer: Any, *, plan: Plan, whole: Mapping[str, Any], **others: Any) -> None:
        self.plan = plan
        self.seq_length = int(whole["seq_length"])

        def samples(*names: str) -> int | None:
            steps = next((whole[name] for name in names if whole[name] is not None), None)
            return None if steps is None else int(steps) * int(whole["global_batch_size"])

        lengths = {
            "lr_warmup_steps": samples("lr_warmup_iters") or 0,
            "lr_decay_steps": samples("lr_decay_iters", "train_iters"),
            "wsd_decay_steps": samples("lr_wsd_decay_iters"),
        }
        super().__init__(optimizer, **{**others, **lengths})

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return a parameter group's learning rate for the next step."""
        samples: Any = self.num_steps
        phase, tokens = self.plan.at_sample(samples), self.plan.tokens_at_sample(samples)
        if phase.lr is not None:
            passed = (tokens - phase.first_token) / (phase.steps * phase.tokens_per_step)
            group_lr: float = param_group.get("max_lr", self.max_lr)
            return phase.lr.at(min(1.0, passed)) * group_lr / self.max_lr
        self.num_steps = tokens / self.seq_length  # for upstream's formulas
        try:
            rate = super().get_lr(param_group)
            assert rate is not None
            return rate
        finally:
            self.num_steps = samples


def use_token_schedule(plan: Plan, whole: Mapping[str, Any]) -> None:
    """Make Megatron's trainer build a `TokenSchedule` with these arguments instead of its `OptimizerParamScheduler`."""
    training.OptimizerParamScheduler = partial(TokenSchedule, plan=plan, whole=whole)


class PhasedDataset(Dataset):
    """Dataset of a segment's samples, indexed by their numbers in the whole run.

    Args:
        parts: the segment's phases, in order, each with a dataset that starts with the phase's first sample.
    """

    def __init__(self, parts: Sequence[tuple[Phase, Dataset]]) -> None:
        self.parts = parts
        self._firsts = [phase.first_sample for phase, _ in parts]

    def __len__(self) -> int:
        return self._firsts[-1] + self.parts[-1][0].samples

    def __getitem__(self, number: int) -> Any:
        if not self._firsts[0] <= number < len(self):
            raise IndexError(
                f"sample {number} is not among this start's samples {self._firsts[0]} to {len(self) - 1}; please "
                "report this"
            )
        phase, dataset = self.parts[bisect.bisect_right(self._firsts, number) - 1]
        return dataset[number - phase.first_sample]


def phased_datasets(plan: Plan, segment: Mapping[str, Any], samples: list[int]) -> tuple[Any, Any, None]:
    """Build the training and validation datasets of one segment.

    Every stream of a phase continues after the sequences that earlier phases of the same sequence length have read from
    it, whatever their blend. All segments use the whole run's validation data, so that losses are comparable.

    Args:
        plan: plan of all phases.
        segment: mapping with `phases`, the names of the segment's phases, and `train_data_path`, which maps the names
            of phases to their data.
        samples: number of samples of each split, as Megatron passes them; only the validation number is used.

    Returns:
        Training, validation and test datasets, as Megatron expects; the last is always None.
    """
    arguments = get_args()
    by_phase = {phase.name: _arguments_of(phase, segment, arguments) for phase in plan.phases}
    shares = {name: _shares(of_phase) for name, of_phase in by_phase.items()}
    drawn = drawn_before(plan, shares, {name: of_phase.mixed_lengths for name, of_phase in by_phase.items()})
    parts = []
    for phase in plan.phases:
        if phase.name in segment["phases"]:
            train, _, _ = build_datasets(by_phase[phase.name], [phase.samples, 0, 0], drawn=drawn[phase.name])
            parts.append((phase, train))
    return PhasedDataset(parts), build_datasets(arguments, [0, samples[1], 0])[1], None


def _arguments_of(phase: Phase, segment: Mapping[str, Any], arguments: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of Megatron's arguments with a phase's training data (see `phased_datasets` for `segment`)."""
    changed, path = copy(arguments), segment["train_data_path"].get(phase.name)
    if path:
        changed.train_data_path = path
        changed.data_path = changed.data_args_path = changed.per_split_data_args_path = None
    if phase.data is not None:
        changed.mixed_lengths = phase.data.get("mixed_lengths")
    return changed


def _shares(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the training blend's shares, keyed by stream prefix; synthetic data count as one stream."""
    blend, blend_per_split = get_blend_and_blend_per_split(arguments)
    chosen = blend or (blend_per_split or [None])[0]
    if chosen is None:
        return {"": 1.0}
    prefixes, weights = chosen
    if weights is None:
        return shares_of(prefixes)
    return shares_of([word for pair in zip(weights, prefixes, strict=True) for word in pair])


def check_consumed(plan: Plan, step: int) -> None:
    """Check that the trainer's own sample count after a step equals the plan's; raise RuntimeError otherwise."""
    consumed, expected = get_args().consumed_train_samples, plan.samples_at_step(step)
    if consumed != expected:
        raise RuntimeError(f"step {step}: {consumed} samples consumed, not {expected} as planned; please report this")
