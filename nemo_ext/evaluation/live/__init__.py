"""Evaluation of a model during training, on the training ranks (docs/evaluation.md). Does not import torch."""

from collections.abc import Mapping
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic.dataclasses import dataclass

from nemo_ext.data.text.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, named_tokenizer
from nemo_ext.data.training import data_sections
from nemo_ext.evaluation.settings import EvaluateSettings
from nemo_ext.job.settings import FLAT, STRICT, Count, Place, checked, prefixed_errors

FOLDER = "evaluate"
"""Folder in a run directory that holds the evaluations, one per step."""
_NEEDED = ("aiohttp", "prometheus_client", "starlette", "transformers", "uvicorn")
_UNFIT = {
    "moe_expert_capacity_factor": "experts drop tokens, so an answer would depend on the other answers in its batch",
    "cuda_graph_impl": "a CUDA graph supports a single sequence length",
}
"""Mapping from each Megatron flag that is incompatible with evaluation during training to the reason."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LiveSettings:
    """Settings in the `evaluate` section of a training config, described in hydra_conf/training.yaml."""

    every: Count | None = None
    tokenizer: Place | None = None
    max_batch: Count = 64
    settings: Annotated[EvaluateSettings, FLAT] = field(default_factory=EvaluateSettings)


def settings_of(config: Mapping[str, Any]) -> LiveSettings:
    """Read the settings in the `evaluate` section of a training config.

    Raises:
        ValueError: a setting is invalid; the message names it.
    """
    return checked(LiveSettings, config.get("evaluate") or {}, where="evaluate")


def tokenizer_of(config: Mapping[str, Any]) -> Tokenizer:
    """Load the tokenizer for evaluations during training.

    Raises:
        ValueError: the config names no tokenizer, or the tokenizer cannot be read or has more ids than the model.
    """
    name = settings_of(config).tokenizer
    named = next((own for data in data_sections(config) if (own := data.get("tokenizer")) is not None), None)
    if name is not None:
        named = named_tokenizer(name)
    if named is None:
        raise ValueError(
            "evaluate.tokenizer=null: evaluations require a tokenizer, and the data config names none; set "
            "evaluate.tokenizer to a Hugging Face folder, or to byte"
        )
    tokenizer = load_tokenizer(named, "data.tokenizer" if name is None else "evaluate.tokenizer")
    with prefixed_errors("evaluate.tokenizer"):
        check_vocabulary(tokenizer.vocab_size, config)
    return tokenizer


def check(config: Mapping[str, Any]) -> None:
    """Check that the evaluations in a training config are possible on a suitable machine; without any, do nothing.

    Raises:
        ValueError: a setting is invalid, a suite or tokenizer is missing, or a Megatron setting excludes
            evaluations.
    """
    live = settings_of(config)
    if live.every is None:
        return
    flags = config["megatron"]
    if int(flags.get("context_parallel_size") or 1) > 1:
        raise ValueError(
            f"evaluate.every={live.every}: evaluation during training does not support "
            f"megatron.context_parallel_size={flags['context_parallel_size']}; set evaluate.every=null, and evaluate "
            "checkpoints instead"
        )
    for flag, why in _UNFIT.items():
        if flags.get(flag) not in (None, "none"):
            raise ValueError(
                f"evaluate.every={live.every} cannot be combined with megatron.{flag}={flags[flag]}, as {why}; set "
                "either to null"
            )
    tokenizer_of(config)
    from nemo_ext.evaluation.job import chosen

    chosen(live.settings)


def check_machine(config: Mapping[str, Any]) -> None:
    """Check that a training config's evaluations can run on this machine.

    Raises:
        ValueError: `check` fails, or a package is not installed.
    """
    check(config)
    every = settings_of(config).every
    if every is not None and (missing := [name for name in _NEEDED if find_spec(name) is None]):
        raise ValueError(f"evaluate.every={every} requires {', '.join(missing)}: pip install 'nemo_ext[serve,rl]'")


def train(config: Mapping[str, Any]) -> None:
    """Run the job `train` on this machine, with an evaluation every `evaluate.every` steps.

    Raises:
        ValueError: a setting is invalid, or not possible on this machine.
    """
    from nemo_ext import launch

    check_machine(config)
    launch.train(config)


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder for the evaluation at a step."""
    return run_dir / FOLDER / f"step_{step:07d}"
