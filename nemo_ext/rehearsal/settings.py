"""The config's section `rehearse`, and a training config as it is rehearsed. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from nemo_ext.data.phases import plan_of
from nemo_ext.job.settings import Strings, Whole


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Section `rehearse` of the config.

    Attributes:
        stages: pipeline ranks: the first, the last and the largest between (`kinds`), `all`, or their numbers from 0.
        variants: key `try`: words that change the config, to be rehearsed beside it.
        gpu_memory_gib: memory of one GPU, or None.
    """

    stages: Literal["kinds", "all"] | tuple[Whole, ...] = "kinds"
    variants: Annotated[Strings, Field(alias="try")] = field(default=())
    gpu_memory_gib: PositiveFloat | None = None


NOT_HERE = (
    "fp8",
    "fp8_format",
    "fp4",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "tp_comm_overlap",
)
"""Flags that need Transformer Engine."""


def rehearsed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A training config as it is rehearsed, and the flags that are set aside.

    Of phases, the one with the longest sequences is rehearsed.

    Raises:
        ValueError: see `plan_of`.
    """
    plan = plan_of(config)
    megatron = dict(config["megatron"])
    if plan is not None:
        longest = max(plan.phases, key=lambda phase: phase.seq_length)
        places = max(int(megatron.get("max_position_embeddings") or 0), longest.seq_length)
        megatron |= {**longest.megatron, "max_position_embeddings": places}
    aside = [name for name in NOT_HERE if megatron.get(name)]
    megatron |= dict.fromkeys(aside)
    if config.get("precision_plan") is not None:
        aside.append("precision_plan")
    if (config.get("distillation") or {}).get("teacher") is not None:
        aside.append("distillation.teacher")
    megatron |= {
        "pretrained_checkpoint": None,
        "mock_data": True,
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "finetune": None,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "vocab_size": megatron.get("vocab_size") or 257,  # of the data; the model has its own
    }
    model = {**config["model"], "backend": "local", "fused_squared_relu": False}
    return {**config, "megatron": megatron, "model": model, "precision_plan": None}, aside
