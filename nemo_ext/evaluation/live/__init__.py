"""Evaluation of the model that is being trained, as it is on its ranks (docs/evaluation.md). No torch here."""

from collections.abc import Mapping
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic.dataclasses import dataclass

from nemo_ext.data.text.tokenizers import Tokenizer, check_vocabulary, load_tokenizer, named_tokenizer
from nemo_ext.data.training import data_sections
from nemo_ext.evaluation.settings import EvaluateSettings
from nemo_ext.job.settings import FLAT, STRICT, Count, Place, checked

FOLDER = "evaluate"
"""Folder, in a run directory, of the evaluations of its steps."""
_NEEDED = ("aiohttp", "prometheus_client", "starlette", "transformers", "uvicorn")
_UNFIT = {
    "moe_expert_capacity_factor": "experts drop tokens, so that an answer would depend on those beside it",
    "cuda_graph_impl": "a graph holds one length of sequences",
}
"""Flags of Megatron under which a model in training cannot be asked -> why."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LiveSettings:
    """Section `evaluate` of a training.

    Attributes:
        every: steps from one evaluation to the next; null for none.
        tokenizer: Hugging Face folder, or `byte`; None takes that of the data.
        max_batch: most sequences in a forward pass.
        settings: benchmarks, and how they are asked.
    """

    every: Count | None = None
    tokenizer: Place | None = None
    max_batch: Count = 64
    settings: Annotated[EvaluateSettings, FLAT] = field(default_factory=EvaluateSettings)


def settings_of(config: Mapping[str, Any]) -> LiveSettings:
    """The settings of a training config's section `evaluate`.

    Raises:
        ValueError: a setting is wrong; names it.
    """
    return checked(LiveSettings, config.get("evaluate") or {}, where="evaluate")


def tokenizer_of(config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer with which the model in training is asked.

    Raises:
        ValueError: the config names none, it cannot be read, or it has more ids than the model.
    """
    name = settings_of(config).tokenizer
    named = next((found for data in data_sections(config) if (found := data.get("tokenizer")) is not None), None)
    if name is not None:
        named = named_tokenizer(name)
    if named is None:
        raise ValueError(
            "evaluate.tokenizer=null: the data name no tokenizer, without which nobody can ask the model: give a "
            "Hugging Face folder, or byte"
        )
    tokenizer = load_tokenizer(named)
    try:
        check_vocabulary(tokenizer.vocab_size, config)
    except ValueError as error:
        raise ValueError(f"evaluate.tokenizer: {error}") from error
    return tokenizer


def check(config: Mapping[str, Any]) -> None:
    """Refuse a training config whose evaluations could be made nowhere; one without any passes.

    Raises:
        ValueError: a setting is wrong, a suite or tokenizer is missing, or the model cannot be asked in this layout.
    """
    live = settings_of(config)
    if live.every is None:
        return
    flags = config["megatron"]
    if int(flags.get("context_parallel_size") or 1) > 1:
        raise ValueError(
            f"evaluate.every={live.every}: megatron.context_parallel_size={flags['context_parallel_size']}: a model in "
            "training is asked without context parallelism only: set evaluate.every=null, and evaluate checkpoints"
        )
    for flag, why in _UNFIT.items():
        if flags.get(flag) not in (None, "none"):
            raise ValueError(f"evaluate.every={live.every}: megatron.{flag}={flags[flag]}: {why}: set either to null")
    tokenizer_of(config)
    from nemo_ext.evaluation.job import chosen

    chosen(live.settings)


def check_machine(config: Mapping[str, Any]) -> None:
    """Refuse a training config whose evaluations could not be made here.

    Raises:
        ValueError: see `check`; or a package is missing here.
    """
    check(config)
    every = settings_of(config).every
    if every is not None and (missing := [name for name in _NEEDED if find_spec(name) is None]):
        raise ValueError(f"evaluate.every={every}: needs {', '.join(missing)}: pip install 'nemo_ext[serve,rl]'")


def train(config: Mapping[str, Any]) -> None:
    """Run the job `train` on this machine, with evaluations of its steps where `evaluate.every` asks for them.

    Raises:
        ValueError: a setting is wrong, or this machine cannot do it.
    """
    from nemo_ext import launch

    check_machine(config)
    launch.train(config)


def folder_of(run_dir: Path, step: int) -> Path:
    """Folder of the evaluation at a step."""
    return run_dir / FOLDER / f"step_{step:07d}"
