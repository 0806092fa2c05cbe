"""Settings of a rehearsal, and the changes that make a training config rehearsable. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_ext.architecture.layout import RECOMPUTED_BY_ENGINE
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import HEAD, LOW, Plan, assigned
from nemo_ext.data.phases import plan_of
from nemo_ext.job.settings import Strings, Whole
from nemo_ext.megatron.fp8 import plan_flags


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Section `rehearse` of the config.

    Attributes:
        stages: pipeline ranks to rehearse: `kinds` (first, last and largest in between), `all`, or numbers from 0.
        variants: key `try`: changes to the config (arguments of `nemo-ext train`) to rehearse as well.
        gpu_memory_gib: memory of one GPU in GiB; null to use the memory of `gpu`, if given.
        imbalance: tokens of the rehearsed rank's experts relative to the mean over expert-parallel ranks.
        gpu: name of the GPU, as listed in `nemo_ext.architecture.gpus`.
        search: whether to search for the fastest layouts that fit instead of rehearsing the config's layout.
        best: number of layouts for the search to find.
    """

    stages: Literal["kinds", "all"] | tuple[Whole, ...] = "kinds"
    variants: Annotated[Strings, Field(alias="try")] = field(default=())
    gpu_memory_gib: PositiveFloat | None = None
    imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    gpu: str | None = None
    search: bool = False
    best: PositiveInt = 3

    def __post_init__(self) -> None:
        if self.search and self.variants:
            raise ValueError("rehearse.search and rehearse.try cannot be combined: remove one of them")
        for change in self.variants:
            own = [word for word in change.split() if is_own(word)]
            if own or not change.strip():
                raise ValueError(
                    f"rehearse.try has {' '.join(own) or 'an empty change'}: expected arguments of `nemo-ext train`; "
                    "give arguments of the rehearsal, which apply to all changes, outside rehearse.try"
                )


def is_own(word: str) -> bool:
    """Return whether a command-line argument belongs to the rehearsal rather than to the rehearsed training."""
    key = word.lstrip("+~").partition("=")[0]
    return key in ("run_dir", "format", "cluster") or key.startswith(("rehearse.", "cluster."))


STAGES = ("library", "distill", "score", "compare")
"""Puzzle's stages that run the parent; `parent` and `heal` are training runs, and other stages need less memory."""
QUANTISED_WEIGHTS = "quantised weights"
"""Kind of memory that FP8 and NVFP4 copies of weights are counted as."""
TE_VERSION = "2.20.2"
"""Version of Transformer Engine whose sources `nemo_ext.rehearsal.transformer_engine` follows."""
NOT_REHEARSED = (
    "fp4",
    "fp4_format",
    "fp8_param_gather",
    "fp8_multi_head_attention",
    "fp8_dot_product_attention",
    "fp8_output_proj",
    "te_precision_config_file",
    "activation_func_fp8_input_store",
    "moe_router_fusion",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "moe_single_grouped_weight",
    "use_transformer_engine_op_fuser",
    "delay_wgrad_compute",
    "tp_comm_overlap",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "te_rng_tracker",
    "logits_load_dir",
)
"""Flags without a stand-in, which a rehearsal ignores and reports: Transformer Engine's options, a teacher's files."""
FP8_FLAGS = ("fp8", "fp8_format", "fp8_recipe", "first_last_layers_bf16")
"""Flags that are rehearsed as a precision plan; other FP8 flags have no effect on the local back end."""


def one_phase(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config itself or, for a run with phases, the config of the phase with the longest sequences."""
    plan = plan_of(config)
    if plan is None:
        return config
    longest = max(plan.phases, key=lambda phase: phase.seq_length)
    flags = {**config["megatron"], **longest.megatron}
    flags["max_position_embeddings"] = max(int(flags.get("max_position_embeddings") or 0), longest.seq_length)
    return {**config, "phases": None, "megatron": flags}


def rehearsed(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Change a training config for a rehearsal; also return the names of the settings that the rehearsal ignores.

    A run with phases is reduced by `one_phase`. The new config's `transformer_engine` section holds precision_plan and
    permute_fusion, which the local back end does not support.

    Raises:
        ValueError: a block's sizes do not fit the scaling, or the phases are invalid (`plan_of`).
    """
    config = one_phase(config)
    megatron = dict(config["megatron"])
    aside = [name for name in NOT_REHEARSED if megatron.get(name)]
    megatron |= dict.fromkeys(aside)
    plan = _plan(megatron, config.get("precision_plan"))
    if (config.get("train") or {}).get("quantization_aware"):
        plan = None
        aside.append("rounded copies of weights and inputs (train.quantization_aware)")
    if plan is not None:
        engine = {**config["model"], "backend": "transformer_engine"}
        megatron |= plan_flags({**config, "model": engine, "megatron": megatron, "precision_plan": plan})
        if any(
            each.weight.part == HEAD and each.precision in LOW
            for each in assigned(Plan.from_config(plan), Architecture.from_config(config))
        ):
            aside.append("FP8 or NVFP4 of the output layer, which is Megatron's own")
    if megatron.get("moe_token_dispatcher_type") == "flex":
        aside.append("moe_token_dispatcher_type=flex, whose kernels send what alltoall does")
        megatron |= {"moe_token_dispatcher_type": "alltoall"}
        megatron |= dict.fromkeys(("moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms"))
    fused = bool(megatron.get("moe_permute_fusion"))
    if megatron.get("moe_grouped_gemm") and not megatron.get("disable_bias_linear"):
        aside.append("moe_grouped_gemm, with biases")
        megatron["moe_grouped_gemm"] = None
    if megatron.get("recompute_granularity") == "selective":
        modules = megatron.get("recompute_modules") or ()
        if by_engine := RECOMPUTED_BY_ENGINE & set(modules):
            aside.append(f"recompute_modules: {', '.join(sorted(by_engine))}")
            megatron["recompute_modules"] = [name for name in modules if name not in by_engine] or None
            megatron["recompute_granularity"] = "selective" if megatron["recompute_modules"] else None
    megatron |= dict.fromkeys((*FP8_FLAGS, "fp4_format", "fp4_recipe", "moe_permute_fusion"))
    megatron |= {
        "pretrained_checkpoint": None,
        "mock_data": True,
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "finetune": None,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "vocab_size": megatron.get("vocab_size") or 257,  # of the data; the model has another
    }
    model = {**config["model"], "backend": "local"}
    engine = {"precision_plan": plan, "permute_fusion": fused}
    changed = {"megatron": megatron, "model": model, "precision_plan": None, "transformer_engine": engine}
    return {**config, **changed}, aside


def _plan(megatron: dict[str, Any], precision_plan: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the precision plan, or one equivalent to Megatron's FP8 flags, which are then removed from `megatron`."""
    fp8_format = megatron.get("fp8_format") or megatron.get("fp8")
    if precision_plan is not None or not fp8_format:
        return precision_plan
    rules = ["head bf16"]
    if megatron.get("first_last_layers_bf16"):
        for side, name in (("first", "num_layers_at_start_in_bf16"), ("last", "num_layers_at_end_in_bf16")):
            count = megatron.get(name)
            rules += [f"{side} {1 if count is None else count} bf16"] if count != 0 else []
    recipe = megatron.get("fp8_recipe") or "delayed"
    megatron |= dict.fromkeys(FP8_FLAGS)
    return {"default": "fp8", "recipe": recipe, "format": fp8_format, "rules": rules}
