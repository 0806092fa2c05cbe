"""Sections `model`, `train` and `launcher` of a training config. Does not import torch."""

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.job.settings import STRICT, Count, Text

Tokens = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Number of tokens, which may be written as 2e12."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelSettings:
    """The `model` section, whose sizes are in the `megatron` section.

    Attributes:
        name: name of the model, for run directories and reports.
        family: family of the model, such as olmo3, which determines the Hugging Face class of exports.
        pattern: letters of the blocks, such as M*M*(ME)x2- (docs/configuration.md).
        backend: modules that Megatron-Core builds blocks from; null chooses according to the machine.
        norm_affine: false for norms without a weight.
        norm_placement: whether a block's norm is applied to its input or to its output.
        qk_norm_scope: whether the norm of queries and keys covers each head or the full width.
        yarn_on_windowed: false for YaRN only in blocks with full attention.
        vocab_size: number of token ids, if the embedding has more rows; null if every row is an id.
        hf_layers: layer of a Hugging Face checkpoint for each block.
        hf_layer_count: number of layers of the Hugging Face checkpoint.
        virtual_pipeline_stages: stages per pipeline rank.
    """

    name: str | int | None = None
    family: str | int | None = None
    pattern: str | None = None
    backend: str | None = None
    norm_affine: bool | None = None
    norm_placement: Literal["input", "output"] | None = None
    qk_norm_scope: Literal["head", "width"] | None = None
    yarn_on_windowed: bool | None = None
    vocab_size: Count | None = None
    hf_layers: Any = None
    hf_layer_count: Count | None = None
    virtual_pipeline_stages: Count | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainSettings:
    """The `train` section.

    Attributes:
        tokens: length of the run.
        tokens_per_step: tokens of a step, for recipes that compute the batch size from it.
        schedule_tokens: length of the learning-rate schedule, if it differs from the run's.
        warmup_tokens: length of the linear learning-rate warm-up.
        decay_tokens: length of the decay at the end of a WSD schedule.
        validate_at_start: true to measure the validation loss before the first step.
        model_of_start: true to take the model from megatron.pretrained_checkpoint instead of model=NAME.
        new_mtp: depths of multi-token prediction, such as /*E, to add with new weights to the model that
            megatron.pretrained_checkpoint has without them.
        mtp_only: true to train only multi-token prediction; the weights of the main model are frozen.
    """

    tokens: Tokens | None = None
    tokens_per_step: Tokens | None = None
    schedule_tokens: Tokens | None = None
    warmup_tokens: Tokens | None = None
    decay_tokens: Tokens | None = None
    validate_at_start: bool = False
    model_of_start: bool = False
    new_mtp: Text | None = None
    mtp_only: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LauncherSettings:
    """The `launcher` section.

    Attributes:
        nodes: number of nodes.
        nproc_per_node: ranks on each node, one per GPU.
    """

    nodes: Count = 1
    nproc_per_node: Count = 1


SECTIONS: dict[str, type[Any]] = {"model": ModelSettings, "train": TrainSettings, "launcher": LauncherSettings}
"""Classes of the sections that have no class elsewhere."""
