"""A run as a sequence of phases in tokens, each with its data, sequence length, batch and first step. No torch.

`train.tokens` is the length of the whole run and Megatron's schedule goes over all of it, whatever the phases are, so
that a blend may change before, inside or after the decay of the learning rate. A phase may have a learning rate of its
own instead (`lr`). Consecutive phases with the same Megatron flags are one segment: one start of the trainer.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.data.blends.plan import MAX_EPOCHS, some_of
from nemo_ext.data.blends.sizes import indexed_tokens
from nemo_ext.data.packs.mixed_lengths import MixedLengths, Reading, sequences_of
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.data.training import use_data
from nemo_ext.job.settings import check_keys, checked_whole, nearest

STYLES = ("linear", "cosine", "minus_sqrt", "constant")

SCHEDULE = ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters", "train_iters", "global_batch_size", "seq_length")
"""Flags that determine the learning rate."""

_DATA = ("train_data_path", "valid_data_path", "data_path", "data_args_path", "per_split_data_args_path")
_WHOLE_RUN = ("seed", *_DATA, *(flag for flag in SCHEDULE if flag not in ("global_batch_size", "seq_length")))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Learning rate of one phase, as a function of the share of its tokens trained on.

    Attributes:
        start: learning rate at the beginning of the phase.
        end: learning rate at its end.
        style: shape of the decay between them; `constant` stays at `start`.
    """

    start: float
    end: float
    style: str = "linear"

    def at(self, share: float) -> float:
        """Learning rate after a share of the phase's tokens, from 0 to 1."""
        if self.style == "constant":
            return self.start
        left = {
            "linear": 1 - share,
            "cosine": 0.5 * (1 + math.cos(math.pi * share)),
            "minus_sqrt": 1 - math.sqrt(share),
        }[self.style]
        return self.end + (self.start - self.end) * left


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase and its place in the run.

    Attributes:
        name: key of the phase in the config.
        seq_length: number of tokens of a sequence.
        global_batch_size: number of sequences of a step.
        first_step: number of steps of the run before the phase.
        first_sample: number of sequences before the phase.
        first_token: number of tokens before the phase.
        steps: number of steps of the phase.
        data: `data` section of the phase; None for that of the config.
        megatron: flags that differ from the config's.
        lr: learning rate of the phase; None for that of the run.
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
        """Number of tokens per step, of all ranks together."""
        return self.seq_length * self.global_batch_size

    @property
    def samples(self) -> int:
        """Number of sequences of the phase."""
        return self.steps * self.global_batch_size

    @property
    def last_step(self) -> int:
        """Last step of the phase, counted from 1."""
        return self.first_step + self.steps


@dataclass(frozen=True)
class Plan:
    """All phases of a run, in order.

    Attributes:
        phases: at least one phase; each begins where the one before it ends.
    """

    phases: tuple[Phase, ...]

    @property
    def segments(self) -> list[tuple[Phase, ...]]:
        """Groups of consecutive phases with the same Megatron flags."""
        return [tuple(each) for _, each in itertools.groupby(self.phases, key=lambda phase: phase.megatron)]

    def at_step(self, step: int) -> Phase:
        """Phase of a step, counted from 1."""
        return next((phase for phase in self.phases if step <= phase.last_step), self.phases[-1])

    def at_sample(self, sample: int) -> Phase:
        """Phase of a sequence, counted from 0."""
        return next((p for p in self.phases if sample < p.first_sample + p.samples), self.phases[-1])

    def tokens_at_step(self, step: int) -> int:
        """Number of tokens trained on after a step."""
        phase = self.at_step(step)
        return phase.first_token + (step - phase.first_step) * phase.tokens_per_step

    def samples_at_step(self, step: int) -> int:
        """Number of sequences trained on after a step."""
        phase = self.at_step(step)
        return phase.first_sample + (step - phase.first_step) * phase.global_batch_size

    def tokens_at_sample(self, sample: int) -> int:
        """Number of tokens before a sequence."""
        phase = self.at_sample(sample)
        return phase.first_token + (sample - phase.first_sample) * phase.seq_length

    def table(self) -> str:
        """Human-readable table with one line per phase."""
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


def plan_of(config: Mapping[str, Any]) -> Plan | None:
    """Read the phases of a composed training config; None if it has none.

    A phase begins at the step whose number of tokens is nearest to the config's, counted from the start of the run, so
    rounding does not add up.

    Raises:
        ValueError: a key is unknown, lengths do not add up to `train.tokens`, or a phase has no steps.
    """
    section: Mapping[str, Any] = config.get("phases") or {}
    if not section:
        return None
    wanted = wanted_tokens(config)
    whole = (config.get("segment") or {}).get("whole") or {}
    total, megatron = float(config["train"]["tokens"]), {**config["megatron"], **whole}
    _check_flags("megatron", megatron)
    if not math.isclose(sum(wanted.values()), total, rel_tol=1e-6):
        each = ", ".join(f"{name} {tokens:g}" for name, tokens in wanted.items())
        raise ValueError(
            f"phases: {each} add up to {sum(wanted.values()):g} tokens, train.tokens is {total:g}: make them equal"
        )
    phases: list[Phase] = []
    step = sample = token = 0
    until = 0.0
    for name, given in section.items():
        until += wanted[name]
        own = {key: value for key, value in (given.get("megatron") or {}).items() if value != megatron.get(key)}
        _check_flags(f"phases.{name}.megatron", own)
        for flag in _WHOLE_RUN:
            if flag in own:
                instead = "give the phase `data`" if flag in _DATA else f"set megatron.{flag}"
                raise ValueError(f"phases.{name}.megatron.{flag} is of the whole run: {instead} instead")
        sizes = {
            key: checked_whole(f"phases.{name}.megatron.{key}", own.get(key, megatron[key]), least=1)
            for key in ("seq_length", "global_batch_size")
        }
        tokens_per_step = sizes["seq_length"] * sizes["global_batch_size"]
        steps = round((until - token) / tokens_per_step)
        if steps < 1:
            raise ValueError(
                f"phases.{name}: {wanted[name]:g} tokens are less than a step of {tokens_per_step:,}: make it longer"
            )
        phases.append(
            Phase(
                name=name,
                **sizes,
                first_step=step,
                first_sample=sample,
                first_token=token,
                steps=steps,
                data=given.get("data"),
                megatron=own,
                lr=_piece(name, given.get("lr")),
            )
        )
        step += steps
        sample += steps * sizes["global_batch_size"]
        token += steps * tokens_per_step
    return Plan(tuple(phases))


def wanted_tokens(config: Mapping[str, Any]) -> dict[str, float]:
    """Number of tokens of each phase of a config, by name, in order.

    Raises:
        ValueError: a phase is wrong; the message names the place.
    """
    section = config.get("phases") or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"phases must be a mapping of phases by their names, not {section!r}")
    return {str(name): _tokens(str(name), given) for name, given in section.items()}


def _check_flags(where: str, flags: Mapping[str, Any]) -> None:
    for flag in ("rampup_batch_size", "train_samples", "exit_interval", "phase_transition_iterations"):
        if flags.get(flag) is not None:
            raise ValueError(f"{where}.{flag} does not go with phases: set it to null")
    if flags.get("weight_decay_incr_style") not in (None, "constant"):
        raise ValueError(
            f"{where}.weight_decay_incr_style={flags['weight_decay_incr_style']} does not go with phases, whose "
            "segments would each begin it anew: set it to constant"
        )


def _tokens(name: str, given: Any) -> float:
    where = f"phases.{name}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}={given!r}: give it tokens, and data, megatron or lr where they are its own")
    check_keys(given, ["tokens", "data", "megatron", "lr"], required=["tokens"], where=where)
    for key in ("data", "megatron", "lr"):
        if given.get(key) is not None and not isinstance(given[key], Mapping):
            raise ValueError(f"{where}.{key}={given[key]!r}: give a mapping")
    tokens = given["tokens"]
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not tokens > 0:
        raise ValueError(f"{where}.tokens={tokens!r}: give a number of tokens above zero")
    return float(tokens)


def _piece(name: str, given: Mapping[str, Any] | None) -> Piece | None:
    if given is None:
        return None
    where = f"phases.{name}.lr"
    check_keys(given, ["start", "end", "style"], required=["start"], where=where)
    style = given.get("style", "linear" if "end" in given else "constant")
    if style not in STYLES:
        raise ValueError(f"{where}.style={style!r}: {nearest(str(style), STYLES)}")
    if style != "constant" and "end" not in given:
        raise ValueError(f"{where}: style={style} goes to an end: give `end`, or style=constant")
    for key in ("start", "end"):
        value = given.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}.{key}={value!r}: give a learning rate")
    piece = Piece(start=float(given["start"]), end=float(given.get("end", given["start"])), style=style)
    if not (math.isfinite(piece.start) and math.isfinite(piece.end) and min(piece.start, piece.end) >= 0):
        raise ValueError(f"{where}: start={piece.start}, end={piece.end}: give learning rates of zero or more")
    return piece


def segments(config: Mapping[str, Any], paths: Mapping[str, list[str] | None]) -> list[dict[str, Any]]:
    """Make the configs of a run's segments, in order; the config itself if it has no phases.

    Each has its own flags and last step, and under `segment`: `phases` (names of the segment's phases), `whole` (the
    whole run's values of flags that segments change) and `train_data_path` of every phase.

    Args:
        config: config of the run, data arguments filled in (`nemo_ext.data.training.use_data`).
        paths: result of `data_paths`.

    Raises:
        ValueError: see `plan_of`.
    """
    plan = plan_of(config)
    if plan is None:
        return [dict(config)]
    whole = config["megatron"]
    changed = {*SCHEDULE, *(key for phase in plan.phases for key in phase.megatron)}
    longest = max(int(whole.get("max_position_embeddings") or 0), *(phase.seq_length for phase in plan.phases))
    made = []
    for phases in plan.segments:
        own = deepcopy(dict(config))
        own["segment"] = {
            "phases": [phase.name for phase in phases],
            "whole": {name: whole.get(name) for name in sorted(changed)},
            "train_data_path": dict(paths),
        }
        own["megatron"] = {
            **own["megatron"],
            "max_position_embeddings": longest,
            **phases[0].megatron,
            "train_iters": phases[-1].last_step,
            # The learning rate follows the whole run's flags; Megatron's parser wants lengths that fit this segment.
            "lr_warmup_iters": 0,
            "lr_decay_iters": None,
            "lr_wsd_decay_iters": 1 if whole.get("lr_decay_style") == "WSD" else None,
        }
        made.append(own)
    return made


def data_paths(config: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """Blend of each phase as Megatron's argument, None for that of the whole run.

    Raises:
        ValueError: see `nemo_ext.data.training.use_data`; or a phase has another tokenizer than the run, or packs
            where the run's loss is not per token.
    """
    plan = plan_of(config)
    return {} if plan is None else {phase.name: _data_path(config, phase) for phase in plan.phases}


def _data_path(config: Mapping[str, Any], phase: Phase) -> list[str] | None:
    if phase.data is None:
        return None
    if config["megatron"].get("mock_data"):
        raise ValueError(f"phases.{phase.name}.data: data=mock has no blends; choose other data or leave it out")
    given = ("train_data_path", "valid_data_path", "data_path")
    own: dict[str, Any] = {
        "data": phase.data,
        "megatron": {k: v for k, v in {**config["megatron"], **phase.megatron}.items() if k not in given},
    }
    before = own["megatron"].get("calculate_per_token_loss")
    use_data(own, tokens=phase.steps * phase.tokens_per_step)
    if own["megatron"].get("calculate_per_token_loss") != before:
        raise ValueError(
            f"phases.{phase.name}.data has packs, whose tokens count alike: set calculate_per_token_loss to true in "
            f"phases.{phase.name}.megatron, or in megatron for the whole run"
        )
    given_tokenizers = [section["tokenizer"] for section in (config["data"], phase.data) if section.get("tokenizer")]
    identities = {load_tokenizer(tokenizer).identity for tokenizer in given_tokenizers}
    if len(identities) > 1:
        raise ValueError(f"phases.{phase.name}.data has another tokenizer than data: a model has one")
    path: list[str] = own["megatron"]["train_data_path"]
    return path


def shares_of(words: Sequence[object]) -> dict[str, float]:
    """Shares of a blend by prefix; they sum to one.

    Args:
        words: Megatron's list: weight, prefix, weight, prefix, ..., or one prefix.

    Raises:
        ValueError: there are several prefixes without weights, whose shares Megatron takes from their sizes.
    """
    words = [words] if isinstance(words, str) else words
    if len(words) == 1:
        return {str(words[0]): 1.0}
    shares: dict[str, float] = {}
    try:
        for weight, prefix in zip(words[::2], words[1::2], strict=True):
            shares[str(prefix)] = shares.get(str(prefix), 0.0) + float(str(weight))
    except ValueError:
        raise ValueError(
            f"train_data_path={list(words)}: a run with phases wants a weight before each prefix"
        ) from None
    return {prefix: share / sum(shares.values()) for prefix, share in shares.items()}


Drawn = Mapping[Reading, Mapping[str, int]]
"""Number of sequences read, by reading and by prefix of the stream."""


def drawn_before(
    plan: Plan, shares: Mapping[str, Mapping[str, float]], mixed: Mapping[str, MixedLengths | None]
) -> dict[str, Drawn]:
    """Sequences of each stream read by earlier phases, by the name of the phase.

    Args:
        plan: plan of all phases.
        shares: shares of the streams, by prefix, in each phase.
        mixed: mixed lengths of each phase.
    """
    drawn: dict[Reading, dict[str, int]] = {}
    before: dict[str, Drawn] = {}
    for phase in plan.phases:
        before[phase.name] = deepcopy(drawn)
        for reading, count in sequences_of(phase.samples, phase.seq_length, mixed[phase.name]).items():
            of = drawn.setdefault(reading, {})
            for prefix, share in shares[phase.name].items():
                of[prefix] = of.get(prefix, 0) + most_drawn(share, count)
    return before


def most_drawn(share: float, count: int) -> int:
    """Upper bound on the sequences of a stream among the first `count` of a blend, at most a few too many.

    Megatron's blend takes the next sequence from the stream that lags most behind its share
    (megatron/core/datasets/helpers.cpp, build_blending_indices): one that does not lag is never taken, so none gets
    more than one ahead.
    """
    rounding = 1e-6
    return 0 if count == 0 else math.floor(share * (count - 1) + rounding) + 1


def resolved_path(config: Mapping[str, Any], phase: Phase) -> list[str] | None:
    """Training data of a phase as Megatron's argument, from the config of a segment: its own or the run's."""
    path: list[str] | None = config["segment"]["train_data_path"].get(phase.name) or config["megatron"].get(
        "train_data_path"
    )
    return path


def mixed_of(config: Mapping[str, Any], phase: Phase) -> Mapping[str, Any] | None:
    """Section `mixed_lengths` of a phase's data: its own or the run's."""
    data = config.get("data") if phase.data is None else phase.data
    mixed: Mapping[str, Any] | None = (data or {}).get("mixed_lengths")
    return mixed


def told_of_streams(config: Mapping[str, Any], *, max_epochs: float = MAX_EPOCHS) -> list[str]:
    """Lines on streams that several phases read: where later phases continue, and which are read too often in all.

    Args:
        config: config of a segment (see `segments`).
        max_epochs: number of passes above which a stream is reported.
    """
    plan = plan_of(config)
    if plan is None:
        return []
    paths = {phase.name: resolved_path(config, phase) for phase in plan.phases}
    if not all(paths.values()):
        return []  # synthetic data, or blends that only Megatron reads
    shares = {name: shares_of(path or ()) for name, path in paths.items()}
    given = {phase.name: mixed_of(config, phase) for phase in plan.phases}
    mixed = {name: None if each is None else MixedLengths(**each) for name, each in given.items()}
    lines = []
    passes: dict[str, list[float]] = {}
    for phase in plan.phases:
        before = drawn_before(plan, shares, mixed)[phase.name]
        on = [
            f"{prefix} after {before[reading][prefix]:,} sequences of {reading.length:,}"
            for reading in sequences_of(phase.samples, phase.seq_length, mixed[phase.name])
            for prefix in shares[phase.name]
            if before.get(reading, {}).get(prefix)
        ]
        if on:
            lines.append(f"{phase.name} goes on in {some_of(on)}")
        for prefix, share in shares[phase.name].items():
            if (index := Path(f"{prefix}.idx")).is_file():
                tokens = share * phase.steps * phase.tokens_per_step
                passes.setdefault(prefix, []).append(tokens / indexed_tokens(index))
    often = [f"{prefix} {sum(each):.3g} times" for prefix, each in passes.items() if sum(each) > max_epochs > max(each)]
    if often:
        lines.append(f"data: read more than max_epochs={max_epochs:g} times in all phases: {some_of(often)}")
    return lines
