"""Measurements of a sweep on one rank. Every rank holds the whole model; ranks split the data, and rank 0 writes files.

FP8 and NVFP4 are computed by `nemo_ext.megatron.float8` on every device, so a laptop and a cluster give the same
numbers up to rounding.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from nemo_ext.architecture.precision_plan import LOW, NANO_IN_BF16, Plan, assigned
from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.cached_inputs import CachedInputs
from nemo_ext.blockwise.parent import Parent
from nemo_ext.blockwise.sharded import open_parent
from nemo_ext.blockwise.token_batches import TokenBatches
from nemo_ext.checkpoint.start import description_of
from nemo_ext.job.files import write_text
from nemo_ext.job.records import append_lines, read_lines
from nemo_ext.job.run_directory import read_config
from nemo_ext.megatron.float8_modules import in_float8
from nemo_ext.megatron.fp8 import Precision
from nemo_ext.megatron.session import data_parallel as process_group
from nemo_ext.puzzle.configs import stage_config
from nemo_ext.puzzle.settings import Batches
from nemo_ext.puzzle.stages.score import loss_sums
from nemo_ext.sensitivity.choose import Option, Proposal, propose, random_within_bits, within_bits
from nemo_ext.sensitivity.settings import read_settings
from nemo_ext.sensitivity.units import Unit, average_bits, in_precisions, kept_by, only, precisions, units
from nemo_ext.sensitivity.workspace import (
    EVERYTHING,
    LOWEST,
    NANO,
    RANDOM,
    REFERENCE,
    Sensitivity,
    Workspace,
    as_json,
    lost,
)


def run(config_path: str) -> None:
    """Measure every unit, choose a plan, and compare it with others, resuming from earlier results.

    Args:
        config_path: path of the composed config, with data arguments filled in.

    Raises:
        ValueError: the plan or the data do not fit the model.
    """
    config = read_config(Path(config_path))
    with process_group():
        Sweep(config).run()


class Sweep:
    """A sensitivity sweep on one rank."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.chosen, self.workspace = read_settings(config), Workspace(Path(config["run_dir"]))
        checkpoint = Path(self.chosen.model)
        description = description_of(checkpoint).without_prediction()
        self.stage = stage_config(config, description, data_parallel.count())
        self.parent = open_parent(self.stage, checkpoint)
        self.plan, self.architecture = Plan.from_config(config["precision_plan"]), description.architecture
        self.every = units(self.plan, self.architecture, self.chosen.per)

    def run(self) -> None:
        """Measure, choose and compare; rank 0 writes the result."""
        on_training = Measurements(self.parent, self._batches("train", self.chosen.calibration), self.workspace.scores)
        if self.chosen.bits is not None:
            self._write(self._within_bits(on_training, self.chosen.bits))
            return
        scores = _score(on_training, self.every, lambda low: Precision(self._only(low), self.architecture))
        losses = {name: lost(score, scores[REFERENCE], self.chosen.metric) for name, score in scores.items()}
        budget = self.chosen.nats or self.chosen.share * losses[EVERYTHING]
        tried = self._propose(on_training, scores[REFERENCE], losses, budget)
        rows = self._compare(tried[-1], sorted(self.every, key=lambda unit: losses[unit.selector]))
        self._write({"budget": budget, "tried": [_tried(proposal) for proposal in tried], "plans": rows})

    def _write(self, content: Mapping[str, Any]) -> None:
        data_parallel.written(lambda: write_text(self.workspace.result, json.dumps(content, indent=1) + "\n"))

    def _within_bits(self, measurements: "Measurements", bits: float) -> dict[str, Any]:
        """Measure every unit in every precision, choose the plan with the least loss, and compare it with others.

        Args:
            bits: budget in average bits per weight of the units.

        Returns:
            The content of the workspace's `result`.
        """

        def plan_of(choice: Sequence[str]) -> Plan:
            return in_precisions(self.plan, dict(zip(self.every, choice, strict=True)), self.architecture)

        def measured(name: str, plan: Plan | None) -> float:
            score = measurements.measure(name, None if plan is None else Precision(plan, self.architecture))
            advance(1)
            return lost(score, measurements.known[REFERENCE], self.chosen.metric)

        alone = {unit: precisions(unit, self.plan) for unit in self.every}
        options: list[list[Option]] = []
        count = 3 + sum(name != "bf16" for names in alone.values() for name in names)
        with data_parallel.progress("sensitivity", count, "measured") as advance:
            measured(REFERENCE, None)
            measured(EVERYTHING, self.plan)
            for number, (unit, names) in enumerate(alone.items()):
                options.append([])
                for name in names:
                    choice = [name if other == number else "bf16" for other in range(len(self.every))]
                    loss = 0.0 if name == "bf16" else measured(f"{unit.selector} {name}", plan_of(choice))
                    options[-1].append(Option(name, unit.parameters * self.plan.bits(name), loss))
            budget = bits * sum(unit.parameters for unit in self.every)
            best = within_bits(options, budget)
            choice = [option.precision for option in best]
            text = " ".join(f"{unit.selector} {name}" for unit, name in zip(self.every, choice, strict=True))
            loss = measured(text, plan_of(choice))
        lowest = plan_of([names[0] for names in alone.values()])
        plans = {REFERENCE: None, EVERYTHING: self.plan, LOWEST: lowest, "proposed": plan_of(choice)}
        plans |= {
            name: plan_of([option.precision for option in random_within_bits(options, budget, seed)])
            for seed, name in enumerate(RANDOM)
        }
        tried = {"precisions": dict(zip((u.selector for u in self.every), choice, strict=True)), "measured": loss}
        tried["added"] = sum(option.loss for option in best)
        rows = self._measured_on_validation(plans)
        for row, plan in zip(rows, plans.values(), strict=True):
            row["bits"] = average_bits(plan or Plan(), self.every, self.architecture)
        return {"bits": bits, "tried": [tried], "plans": rows}

    def _propose(
        self, measurements: "Measurements", reference: Sensitivity, losses: Mapping[str, float], budget: float
    ) -> list[Proposal]:
        with data_parallel.progress("plans", self.chosen.attempts, "tried") as advance:

            def measure(low: Sequence[Unit]) -> float:
                name = "+".join(unit.selector for unit in low)
                score = measurements.measure(name, Precision(self._only(low), self.architecture))
                advance(1)
                return lost(score, reference, self.chosen.metric)

            return propose(
                self.every,
                [losses[unit.selector] for unit in self.every],
                budget,
                measure,
                everything=losses[EVERYTHING],
                attempts=self.chosen.attempts,
            )

    def _compare(self, best: Proposal, by_loss: Sequence[Unit]) -> list[dict[str, Any]]:
        """Compare the proposal with other plans on validation data.

        Args:
            by_loss: all units, the least sensitive first.

        Returns:
            For each plan, its name, loss, rules and bytes (see `as_json`).
        """
        plans: dict[str, Plan | None] = {REFERENCE: None, EVERYTHING: self.plan, "proposed": self._only(best.low)}
        if in_bf16 := kept_by(NANO_IN_BF16, self.every, self.architecture):
            plans[NANO] = self._only([unit for unit in self.every if unit not in in_bf16])
        if 0 < len(best.low) < len(self.every):
            plans["proposed turned round"] = self._only(_reversed_choice(best, by_loss))
        return self._measured_on_validation(plans)

    def _measured_on_validation(self, plans: Mapping[str, Plan | None]) -> list[dict[str, Any]]:
        measurements = Measurements(self.parent, self._batches("valid", self.chosen.evaluation), None)
        rows = []
        with data_parallel.progress("compare", len(plans), "plans") as advance:
            for name, plan in plans.items():
                score = measurements.measure(name, None if plan is None else Precision(plan, self.architecture))
                rows.append(as_json(score, plan, self.architecture))
                advance(1)
        return rows

    def _only(self, low: Sequence[Unit]) -> Plan:
        return only(self.plan, low, self.every)

    def _batches(self, split: Any, size: Batches) -> list[Tensor]:
        return TokenBatches(self.stage, split, size.sequences, self.parent.device).batches(size.batch)


def _reversed_choice(best: Proposal, by_loss: Sequence[Unit]) -> list[Unit]:
    """Return the FP8 units of a plan that keeps the least sensitive units in BF16, within the BF16 bytes of `best`.

    `by_loss` are all units, the least sensitive first.
    """
    budget = sum(unit.bytes for unit in by_loss if unit not in best.low)
    low = []
    for unit in by_loss:
        if unit.bytes <= budget:
            budget -= unit.bytes
        else:
            low.append(unit)
    return low


def _tried(proposal: Proposal) -> dict[str, Any]:
    return {
        "fp8": [unit.selector for unit in proposal.low],
        "added": proposal.added,
        "measured": proposal.measured,
    }


class Measurements:
    """Losses of plans on one set of batches.

    Args:
        batches: this rank's tokens `[batch, seq]`.
        file: file that earlier measurements are read from and new ones written to; None to save none.
    """

    def __init__(self, parent: Parent, batches: Sequence[Tensor], file: Path | None) -> None:
        self.parent, self.batches, self.file = parent, batches, file
        count = sum(tokens.shape[0] * (tokens.shape[1] - 1) for tokens in batches)
        self.tokens = int(data_parallel.summed(torch.tensor(count)))
        self.inputs = CachedInputs(parent, batches)
        self.known: dict[str, Sensitivity] = {}
        if file is not None:
            self.known = {
                line.name: line for line in data_parallel.agreed(partial(read_lines, file, Sensitivity, what="a score"))
            }

    def measure(self, name: str, precision: Precision | None) -> Sensitivity:
        """Measure a plan, or return the earlier result with this name; `precision` is None for the unchanged model."""
        if name not in self.known:
            kl, loss = self._measure(precision)
            self.known[name] = Sensitivity(name, kl, loss, self.tokens)
            if self.file is not None:
                data_parallel.written(partial(append_lines, self.file, [self.known[name]], Sensitivity, what="a score"))
        return self.known[name]

    @torch.no_grad()
    def _measure(self, precision: Precision | None) -> tuple[float, float]:
        first = 0 if precision is None else _first_block(precision)
        sums = torch.zeros(3, dtype=torch.double)
        for tokens, inputs, last in self.inputs.at(first):
            exact = self.parent.logits_of(last)[:, :-1]
            hidden, logits = last, exact
            if precision is not None:
                with in_float8(self.parent.model, precision):
                    hidden = self.parent.hidden_from(first, inputs)
                    logits = self.parent.logits_of(hidden)[:, :-1]
            reference = log_softmax(exact.float(), -1)
            sums += loss_sums(reference, logits, tokens[:, 1:], last[:-1], hidden[:-1]).cpu()
        kl, loss, _ = (data_parallel.summed(sums) / self.tokens).tolist()
        return kl, loss


def _first_block(precision: Precision) -> int:
    """Return the 0-based number of the first block with FP8 or NVFP4 weights.

    If only the output layer has such weights, or there are none, it is the last block's number.
    """
    weights = (each.weight for each in assigned(precision.plan, precision.architecture) if each.precision in LOW)
    return min((w.block for w in weights if w.block is not None), default=len(precision.architecture.sizes) - 1)


def _score(
    measurements: Measurements, every: Sequence[Unit], in_fp8: Callable[[Sequence[Unit]], Precision]
) -> dict[str, Sensitivity]:
    """Score the unchanged model, and the model with all units, each single unit and each group of units in FP8.

    Args:
        every: all units.
        in_fp8: function that returns the plan with only these units in FP8.

    Returns:
        Scores, keyed by their names (`Sensitivity.name`).
    """
    groups = {group: [unit for unit in every if unit.group == group] for group in dict.fromkeys(u.group for u in every)}
    plans: Mapping[str, Sequence[Unit] | None] = {
        REFERENCE: None,
        EVERYTHING: every,
        **{unit.selector: [unit] for unit in every},
        **{f"all {group}": members for group, members in groups.items()},
    }
    with data_parallel.progress("sensitivity", len(plans), "measured") as advance:
        scores = {}
        for name, low in plans.items():
            scores[name] = measurements.measure(name, None if low is None else in_fp8(low))
            advance(1)
    return scores
