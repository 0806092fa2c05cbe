"""The config's section `rehearse`, and a training config as it is rehearsed. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_ext.job.settings import Strings, Whole


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Section `rehearse` of the config.

    Attributes:
        stages: pipeline ranks: the first, the last and the largest between (`kinds`), `all`, or their numbers from 0.
        variants: key `try`: words that change the config, to be rehearsed beside it.
        gpu_memory_gib: memory of one GPU; None for that of `gpu` or `site`, if they are given.
        gpu: name of the GPU in `nemo_ext.architecture.gpus`.
        site: site of `hydra_conf/cluster` whose GPUs it runs on.
        search: whether the fastest layouts that fit are looked for, in place of the config's own.
        best: how many of them.
    """

    stages: Literal["kinds", "all"] | tuple[Whole, ...] = "kinds"
    variants: Annotated[Strings, Field(alias="try")] = field(default=())
    gpu_memory_gib: PositiveFloat | None = None
    gpu: str | None = None
    site: str | None = None
    search: bool = False
    best: PositiveInt = 3

    def __post_init__(self) -> None:
        if self.gpu is not None and self.site is not None:
            raise ValueError("rehearse.gpu and rehearse.site are both set: a site names its GPU")
        if self.search and self.variants:
            raise ValueError("rehearse.search and rehearse.try exclude each other: one finds the changes itself")


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
    """A training config as it is rehearsed, and the flags that are set aside."""
    megatron = dict(config["megatron"])
    aside = [name for name in NOT_HERE if megatron.get(name)]
    megatron |= dict.fromkeys(aside)
    if config.get("precision_plan") is not None:
        aside.append("precision_plan")
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
