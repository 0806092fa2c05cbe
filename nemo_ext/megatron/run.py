"""Training run derived from a composed config: phases, data, and the configs with which ranks start.

Does not import torch at module level.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.retention import Retention
from nemo_ext.checkpoint.start import model_of_start
from nemo_ext.data.blends.plan import MAX_EPOCHS
from nemo_ext.data.phases import Plan, data_paths, describe_shared_streams, plan_of, segments
from nemo_ext.data.training import data_sections, tokenize_streams, with_data
from nemo_ext.job.settings import checked_whole
from nemo_ext.megatron.fp8 import plan_flags
from nemo_ext.megatron.guard import Guard, check_events, guard_flags
from nemo_ext.memory import sampler

_SECTIONS = ("data", "distillation", "evaluate", "guard", "phases", "precision_plan", "retention", "stability")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training run, created by `Run.from_config`.

    Attributes:
        composed: the composed config.
        config: config of the whole run, including its precision plan's flags and its data arguments.
        plan: phases of the run; None if it has none.
        segments: configs with which ranks start, one after the other: only `config`, or one for each segment (phases
            that one start of the ranks trains).
    """

    composed: Mapping[str, Any]
    config: Mapping[str, Any]
    plan: Plan | None
    segments: tuple[Mapping[str, Any], ...]

    @classmethod
    def from_config(cls, composed: Mapping[str, Any]) -> "Run":
        """Derive the run from a composed config; streams not tokenised yet are given the config's assumed sizes.

        Raises:
            ValueError: a value has the wrong type; or see `model_of_start`, `plan_flags`, `with_data`, `guard_flags`,
                `plan_of`, `data_paths` and `Retention.from_config`.
        """
        _check_kinds(composed)
        sampler.interval(composed)
        Retention.from_config(composed)
        config = {**composed, **model_of_start(composed)}
        config["megatron"] = {**config["megatron"], **plan_flags(config)}
        config = with_data(config)
        plan = plan_of(config)
        starts = [config] if plan is None else [config, *segments(config, plan, data_paths(config, plan))]
        for start in starts:  # separately, because their last steps differ
            start["megatron"] |= guard_flags(start)
        return cls(composed=composed, config=config, plan=plan, segments=tuple(starts[1:] or starts))

    def tokenized(self) -> "Run":
        """Tokenise the run's streams, and return the run with blend shares computed from the resulting files.

        Raises:
            ValueError: see `tokenize_streams`.
        """
        changed = [tokenize_streams(data) for data in data_sections(self.composed)]
        return Run.from_config(self.composed) if any(changed) else self

    def check(self) -> None:
        """Check everything that can be checked on any machine.

        Raises:
            ValueError: see `nemo_ext.megatron.check.check` and `check_events`; or a checkpoint's pickles hold objects
                other than data.
        """
        from nemo_ext.megatron.check import check, check_objects

        check(self.config)
        check_objects(self.config)
        check_events(Path(str(self.config["run_dir"])), Guard.from_config(self.config))
        if len(self.segments) > 1:
            for segment in self.segments:
                check(segment)

    def stream_remarks(self) -> list[str]:
        """Return remarks on streams that several phases read (see `nemo_ext.data.phases.describe_shared_streams`)."""
        limit = (self.composed.get("data") or {}).get("max_epochs") or MAX_EPOCHS
        return [] if self.plan is None else describe_shared_streams(self.segments[0], self.plan, max_epochs=limit)


def _check_kinds(config: Mapping[str, Any]) -> None:
    """Check that the run directory is a string, that sections are mappings, and that counts are whole numbers."""
    if not isinstance(config["run_dir"], str):
        raise ValueError(f"run_dir={config['run_dir']!r}: expected a folder, such as runs/mine")
    for name in _SECTIONS:
        if not isinstance(config.get(name) or {}, Mapping):
            raise ValueError(f"{name}={config[name]!r}: expected a section; set its keys, as in {name}.KEY=VALUE")
    for name in ("train_iters", "padded_vocab_size"):
        if config["megatron"].get(name) is not None:
            checked_whole(f"megatron.{name}", config["megatron"][name])


def target_of(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the step at which ranks with this config end, and advice on how to continue from there."""
    steps, stop = int(config["megatron"]["train_iters"]), config["megatron"].get("exit_interval")
    if stop is not None and int(stop) < steps:
        advice = f"megatron.exit_interval stops it there; for all {steps} steps set megatron.exit_interval=null"
        return int(stop), advice
    return steps, "more steps: train.tokens=..."
