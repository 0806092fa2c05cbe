"""Phases of a run in tokens, each with its data, sequence length, batch size and first step. Does not import torch.

`train.tokens` is the length of the whole run. Megatron's learning-rate schedule covers all of it, independently of the
phases, so a blend may change before, during or after the decay; a phase may set its own learning rate instead (`lr`).
Consecutive phases with the same Megatron flags form a segment; the trainer is started once per segment.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.data.blends.blend import shares_of
from nemo_ext.data.blends.plan import some_of
from nemo_ext.data.blends.sizes import indexed_tokens
from nemo_ext.data.packs.mixed_lengths import MixedLengths, Reading, sequences_of
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.data.training import with_data
from nemo_ext.job.settings import STRICT, checked, checked_whole, prefixed_errors

SCHEDULE = ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters", "train_iters", "global_batch_size", "seq_length")
"""Megatron flags that determine the learning-rate schedule."""

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_DATA = ("train_data_path", "valid_data_path", "data_path", "data_args_path", "per_split_data_args_path")
_WHOLE_RUN = ("seed", *_DATA, *(flag for flag in SCHEDULE if flag not in ("global_batch_size", "seq_length")))


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Piece:
    """Learning rate of one phase, as a function of the fraction of its tokens trained on so far.

    Attributes:
        start: learning rate at the beginning of the phase.
        end: learning rate at the end of the phase; None to keep it constant.
        style: shape of the decay between them; by default `linear`, or `constant` without an end.
    """

    start: Rate
    end: Rate | None = None
    style: Literal["linear", "cosine", "minus_sqrt", "constant"] | None = None

    def __post_init__(self) -> None:
        style = self.style or ("constant" if self.end is None else "linear")
        if style != "constant" and self.end is None:
            raise ValueError(f"lr.style={style} requires lr.end: set lr.end, or set lr.style to constant")
        object.__setattr__(self, "style", style)
        object.__setattr__(self, "end", self.start if style == "constant" else self.end)

    def at(self, share: float) -> float:
        """Return the learning rate once the given fraction (0 to 1) of the phase's tokens has been trained on."""
        assert self.end is not None
        shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "minus_sqrt": 1 - math.sqrt(share)}
        return self.end + (self.start - self.end) * shapes.get(str(self.style), 1 - share)


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Section:
    """A phase as written in the config: its number of tokens, and the settings in which it differs from the run."""

    tokens: Annotated[float, Field(gt=0)]
    data: dict[str, Any] | None = None
    megatron: dict[str, Any] | None = None
    lr: Piece | None = None


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase and its position in the run.

    Attributes:
        name: key of the phase in the config.
        seq_length: number of tokens per sequence.
        global_batch_size: number of sequences per step.
        first_step: number of the run's steps before the phase.
        first_sample: number of sequences before the phase.
        first_token: number of tokens before the phase.
        steps: number of steps in the phase.
        data: the phase's `data` section; None to use the run's.
        megatron: flags that differ from the run's.
        lr: learning rate of the phase; None to use the run's schedule.
    """

    name: str
    seq_length: int
    global_batch_size: int
    first_step: int
    first_sample: int
    first_token: int
    steps: int
    data: Mapping[str, Any] | None = None
    megatron: Mapping[str, Any]
    lr: Piece | None = None

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per step, over all ranks."""
        return self.seq_length * self.global_batch_size

    @property
    def samples(self) -> int:
        """Number of sequences in the phase."""
        return self.steps * self.global_batch_size

    @property
    def last_step(self) -> int:
        """Number of the phase's last step, counting from 1."""
        return self.first_step + self.steps


@dataclass(frozen=True)
class Plan:
    """All phases of a run, in order.

    Attributes:
        phases: the phases, at least one; each begins where the previous one ends.
    """

    phases: tuple[Phase, ...]

    @property
    def segments(self) -> list[tuple[Phase, ...]]:
        """Groups of consecutive phases with the same Megatron flags."""
        return [tuple(group) for _, group in itertools.groupby(self.phases, key=lambda phase: phase.megatron)]

    def at_step(self, step: int) -> Phase:
        """Return the phase that contains a step, counting from 1."""
        return next((phase for phase in self.phases if step <= phase.last_step), self.phases[-1])

    def at_sample(self, sample: int) -> Phase:
        """Return the phase that contains a sequence, counting from 0."""
        return next((p for p in self.phases if sample < p.first_sample + p.samples), self.phases[-1])

    def tokens_at_step(self, step: int) -> int:
        """Return the number of tokens trained on by the end of a step."""
        phase = self.at_step(step)
        return phase.first_token + (step - phase.first_step) * phase.tokens_per_step

    def samples_at_step(self, step: int) -> int:
        """Return the number of sequences trained on by the end of a step."""
        phase = self.at_step(step)
        return phase.first_sample + (step - phase.first_step) * phase.global_batch_size

    def tokens_at_sample(self, sample: int) -> int:
        """Return the number of tokens that precede a sequence."""
        phase = self.at_sample(sample)
        return phase.first_token + (sample - phase.first_sample) * phase.seq_length

    def table(self) -> str:
        """Return a human-readable table with one line per phase."""
        rows: list[tuple[str, ...]] = [("phase", "from step", "steps", "from token", "tokens", "sequence", "batch")]
        for p in self.phases:
            numbers = (p.first_step + 1, p.steps, p.first_token, p.steps * p.tokens_per_step)
            rows.append((p.name, *(f"{n:,}" for n in (*numbers, p.seq_length, p.global_batch_size))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        first, *others = widths
        return "\n".join(
            "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))])
            for row in rows
        )


def sections_of(config: Mapping[str, Any]) -> dict[str, Section]:
    """Return the validated sections of a config's phases, keyed by name, in order.

    Raises:
        ValueError: a phase is invalid.
    """
    phases = config.get("phases") or {}
    if not isinstance(phases, Mapping):
        raise ValueError(f"phases must be a mapping from names to phases, not {phases!r}")
    return {str(name): checked(Section, values, f"phases.{name}", strict=True) for name, values in phases.items()}


def plan_of(config: Mapping[str, Any]) -> Plan | None:
    """Plan the phases of a composed training config; return None if it has none.

    A phase begins at the step nearest to its first token, counted from the start of the run, so that rounding errors
    do not accumulate.

    Raises:
        ValueError: a key is unknown, lengths do not add up to `train.tokens`, or a phase has no steps.
    """
    sections = sections_of(config)
    if not sections:
        return None
    total, planned = float(config["train"]["tokens"]), sum(section.tokens for section in sections.values())
    megatron = {**config["megatron"], **((config.get("segment") or {}).get("whole") or {})}
    _check_flags("megatron", megatron)
    if not math.isclose(planned, total, rel_tol=1e-6):
        lengths = ", ".join(f"{name} {section.tokens:g}" for name, section in sections.items())
        raise ValueError(
            f"phases add up to {planned:g} tokens ({lengths}), but train.tokens={total:g}: make the two equal"
        )
    phases: list[Phase] = []
    step = sample = token = 0
    until = 0.0
    for name, section in sections.items():
        until += section.tokens
        flags = {key: value for key, value in (section.megatron or {}).items() if value != megatron.get(key)}
        _check_flags(f"phases.{name}.megatron", flags)
        for flag in _WHOLE_RUN:
            if flag in flags:
                instead = f"set phases.{name}.data" if flag in _DATA else f"set megatron.{flag}"
                raise ValueError(f"phases.{name}.megatron.{flag} applies to the whole run: {instead} instead")
        sizes = {
            key: checked_whole(f"{place}.{key}", flags.get(key, megatron[key]), least=1)
            for key in ("seq_length", "global_batch_size")
            for place in [f"phases.{name}.megatron" if key in flags else "megatron"]
        }
        tokens_per_step = sizes["seq_length"] * sizes["global_batch_size"]
        steps = round((until - token) / tokens_per_step)
        if steps < 1:
            raise ValueError(
                f"phases.{name}.tokens={section.tokens:g} is less than one step of {tokens_per_step:,} tokens: make "
                "the phase longer"
            )
        phases.append(
            Phase(
                name=name,
                **sizes,
                first_step=step,
                first_sample=sample,
                first_token=token,
                steps=steps,
                data=section.data,
                megatron=flags,
                lr=section.lr,
            )
        )
        step += steps
        sample += steps * sizes["global_batch_size"]
        token += steps * tokens_per_step
    return Plan(tuple(phases))


def _check_flags(where: str, flags: Mapping[str, Any]) -> None:
    for flag in ("rampup_batch_size", "train_samples", "exit_interval", "phase_transition_iterations"):
        if flags.get(flag) is not None:
            raise ValueError(f"{where}.{flag} cannot be combined with phases: set it to null")
    if flags.get("weight_decay_incr_style") not in (None, "constant"):
        raise ValueError(
            f"{where}.weight_decay_incr_style={flags['weight_decay_incr_style']} cannot be combined with phases, since "
            "each segment would start the increase over: set it to constant"
        )


def segments(
    config: Mapping[str, Any], plan: Plan, paths: Mapping[str, Sequence[str] | None]
) -> tuple[dict[str, Any], ...]:
    """Build the configs of a run's segments, in order.

    A segment's config has its flags and last step, and a `segment` section with `phases` (the names of its phases),
    `whole` (the run's values of the flags that segments change) and `train_data_path` (one value per phase). The
    `config` is the run's, including data arguments (`nemo_ext.data.training.with_data`).
    """
    whole = config["megatron"]
    changed = {*SCHEDULE, *(key for phase in plan.phases for key in phase.megatron)}
    longest = max(int(whole.get("max_position_embeddings") or 0), *(phase.seq_length for phase in plan.phases))
    configs = []
    for phases in plan.segments:
        segment = deepcopy(dict(config))  # YAML would write shared objects as references
        segment["segment"] = {
            "phases": [phase.name for phase in phases],
            "whole": {name: whole.get(name) for name in sorted(changed)},
            "train_data_path": dict(paths),
        }
        segment["megatron"] = {
            **segment["megatron"],
            "max_position_embeddings": longest,
            **phases[0].megatron,
            "train_iters": phases[-1].last_step,
            # The learning rate follows the whole run's flags; Megatron's parser requires lengths within this segment.
            "lr_warmup_iters": 0,
            "lr_decay_iters": None,
            "lr_wsd_decay_iters": 1 if whole.get("lr_decay_style") == "WSD" else None,
        }
        configs.append(segment)
    return tuple(configs)


def data_paths(config: Mapping[str, Any], plan: Plan) -> dict[str, list[str] | None]:
    """Return each phase's blend as Megatron's argument, keyed by phase; None where it uses the run's.

    Raises:
        ValueError: see `nemo_ext.data.training.with_data`. Also raised if a phase has a different tokenizer than the
            run, packs without `calculate_per_token_loss`, or a different sequence length than the run's validation
            packs.
    """
    validation, length = ((config.get("data") or {}).get("packed") or {}).get("valid"), config["megatron"]["seq_length"]
    for phase in plan.phases:
        if validation and (phase_length := phase.megatron.get("seq_length", length)) != length:
            raise ValueError(
                f"phases.{phase.name}.megatron.seq_length={phase_length}, but the run validates on packs with a fixed "
                f"length of {length} tokens: set seq_length to {length}, or data.packed.valid to null"
            )
    return {phase.name: None if phase.data is None else _own_path(config, phase) for phase in plan.phases}


def _own_path(config: Mapping[str, Any], phase: Phase) -> list[str]:
    where, data = f"phases.{phase.name}", phase.data or {}
    if config["megatron"].get("mock_data"):
        raise ValueError(
            f"{where}.data cannot be combined with data=mock: choose other data for the run, or remove {where}.data"
        )
    paths = ("train_data_path", "valid_data_path", "data_path")
    flags = {key: value for key, value in {**config["megatron"], **phase.megatron}.items() if key not in paths}
    with prefixed_errors(where):
        filled = with_data({"data": data, "megatron": flags}, tokens=phase.steps * phase.tokens_per_step)["megatron"]
    if filled.get("calculate_per_token_loss") != flags.get("calculate_per_token_loss"):
        raise ValueError(
            f"{where}.data contains packs, which require a per-token loss: set calculate_per_token_loss to true in "
            f"{where}.megatron, or in megatron for the whole run"
        )
    tokenizers = [section["tokenizer"] for section in (config["data"], data) if section.get("tokenizer")]
    if len({load_tokenizer(tokenizer).identity for tokenizer in tokenizers}) > 1:
        raise ValueError(f"{where}.data.tokenizer differs from data.tokenizer: use the same tokenizer in all phases")
    path: list[str] = filled["train_data_path"]
    return path


Drawn = Mapping[Reading, Mapping[str, int]]
"""Number of sequences read so far: a mapping from `Reading` to counts keyed by stream prefix."""


def drawn_before(
    plan: Plan, shares: Mapping[str, Mapping[str, float]], mixed: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Drawn]:
    """Return an upper bound on the sequences read before each phase, keyed by phase, `Reading` and stream prefix.

    Args:
        shares: for each phase, its streams' shares keyed by prefix.
        mixed: for each phase, its `mixed_lengths` section; None if it has none.
    """
    drawn: dict[Reading, dict[str, int]] = {}
    before: dict[str, Drawn] = {}
    for phase in plan.phases:
        before[phase.name] = deepcopy(drawn)
        for reading, count in _readings(phase, mixed[phase.name]).items():
            by_prefix = drawn.setdefault(reading, {})
            for prefix, share in shares[phase.name].items():
                by_prefix[prefix] = by_prefix.get(prefix, 0) + most_drawn(share, count)
    return before


def _readings(phase: Phase, mixed: Mapping[str, Any] | None) -> dict[Reading, int]:
    return sequences_of(phase.samples, phase.seq_length, None if mixed is None else MixedLengths(**mixed))


def most_drawn(share: float, count: int) -> int:
    """Return an upper bound, at most a few too high, on the sequences that a stream gets among a blend's first `count`.

    Megatron's blend takes the next sequence from the stream that lags most behind its share
    (megatron/core/datasets/helpers.cpp, build_blending_indices), so no stream gets more than one sequence ahead.
    """
    rounding = 1e-6
    return 0 if count == 0 else math.floor(share * (count - 1) + rounding) + 1


def data_of(config: Mapping[str, Any], phase: Phase) -> tuple[Sequence[str] | None, Mapping[str, Any] | None]:
    """Return a phase's training data as Megatron's argument, and its `mixed_lengths`; by default, the run's.

    The `config` is a segment's (see `segments`).
    """
    path = config["segment"]["train_data_path"].get(phase.name) or config["megatron"].get("train_data_path")
    data = config.get("data") if phase.data is None else phase.data
    return path, (data or {}).get("mixed_lengths")


def describe_shared_streams(config: Mapping[str, Any], plan: Plan, *, max_epochs: float) -> list[str]:
    """Return notices about streams read by several phases: where later phases resume, and totals above `max_epochs`.

    Args:
        config: config of a segment (see `segments`).
        max_epochs: number of epochs above which a stream is reported.
    """
    data = {phase.name: data_of(config, phase) for phase in plan.phases}
    if not all(path for path, _ in data.values()):
        return []  # mock data, or blends that only Megatron reads
    shares = {name: shares_of(path or ()) for name, (path, _) in data.items()}
    mixed = {name: section for name, (_, section) in data.items()}
    drawn = drawn_before(plan, shares, mixed)
    lines = []
    epochs_of: dict[str, list[float]] = {}
    for phase in plan.phases:
        resumed = [
            f"{prefix} after {before[prefix]:,} sequences of {reading.length:,}"
            for reading in _readings(phase, mixed[phase.name])
            if (before := drawn[phase.name].get(reading, {}))
            for prefix in shares[phase.name]
            if before.get(prefix)
        ]
        if resumed:
            lines.append(f"phase {phase.name} resumes {some_of(resumed)}")
        for prefix, share in shares[phase.name].items():
            if (index := Path(f"{prefix}.idx")).is_file():
                tokens = share * phase.steps * phase.tokens_per_step
                epochs_of.setdefault(prefix, []).append(tokens / indexed_tokens(index))
    often = [
        f"{prefix} {sum(epochs):.3g} times"
        for prefix, epochs in epochs_of.items()
        if sum(epochs) > max_epochs > max(epochs)
    ]
    if often:
        lines.append(
            f"data: some streams are read more than max_epochs={max_epochs:g} times over all phases: {some_of(often)}; "
            "add text or lower their shares"
        )
    return lines
