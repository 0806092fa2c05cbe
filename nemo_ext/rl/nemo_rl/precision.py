"""Translation of a precision plan for NeMo-RL: vLLM quantises each new policy, and Megatron trains in FP8.

NeMo-RL's generation supports FP8 with blocks of 128x128 and, in newer versions, MXFP8. Modules are excluded by keywords
in their names (`quantization_ignored_layer_kws`), which can select individual blocks. `num_first_layers_in_bf16` is not
used, because in NeMo-RL 0.5 to 0.7 it produces a nested list, which vLLM ignores.
"""

from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.nemo_rl.draft import Draft
from nemo_ext.rl.precision import Precision

GENERATION = "policy.generation.vllm_cfg"
TRAINING = "policy.megatron_cfg.fp8_cfg"
IGNORED = "quantization_ignored_layer_kws"


def render_precision(precision: Precision, algorithm: Algorithm, *, backend: str, draft: Draft) -> None:
    """Write a precision plan into a draft of NeMo-RL's config for a backend, megatron or dtensor."""
    if precision.head:
        draft.cannot("precision_plan.rules", "neither vLLM nor Megatron supports FP8 in the output layer; BF16 is used")
    if precision.in_("generation"):
        _generation(precision, algorithm, backend, draft)
    if precision.in_("training"):
        _training(precision, backend, draft)


def _generation(precision: Precision, algorithm: Algorithm, backend: str, draft: Draft) -> None:
    plan = precision.plan
    if not isinstance(algorithm, PolicyGradient):
        if precision.where == "generation":
            draft.cannot("precision_plan", f"{algorithm.algorithm} does not generate; use nemo_rl.fp8_in=training")
        return
    if not plan.uses_fp8:
        draft.cannot("precision_plan.kv_cache", "NeMo-RL supports an FP8 cache only with FP8 weights; BF16 is used")
        return
    draft.put("precision_plan.default", f"{GENERATION}.precision", "fp8")
    ignored = list(precision.high)
    if plan.recipe == "mxfp8" and draft.has(f"{GENERATION}.is_mx"):
        # vLLM's ModelOpt path excludes nothing by default (NeMo-RL's recipes name lm_head and mlp.gate).
        ignored += precision.never
        draft.put("precision_plan.recipe", f"{GENERATION}.is_mx", True)
        # MXFP8 scales are always powers of two, but NeMo-RL requires these keys.
        for operand in ("weight", "activation"):
            if draft.has(key := f"{GENERATION}.pow2_{operand}_scaling_factors"):
                draft.put("precision_plan.recipe", key, True)
    elif plan.recipe != "blockwise":
        draft.cannot(
            "precision_plan.recipe",
            f"this version generates in FP8 with blocks of 128x128, not {plan.recipe}: it does not reload weights "
            "layer by layer, as vLLM's other schemes require",
        )
    if ignored:
        draft.put("precision_plan.rules", f"{GENERATION}.{IGNORED}", ignored)
    _cache(precision, algorithm, backend, draft)
    if algorithm.loss.importance_correction.kind == "none" and algorithm.asynchronous is None:
        draft.cannot(
            "loss.importance_correction.kind", "generation in FP8 requires a correction; kind=untruncated is used"
        )
        draft.put("loss.importance_correction.kind", "loss_fn.use_importance_sampling_correction", True)


def _cache(precision: Precision, algorithm: PolicyGradient, backend: str, draft: Draft) -> None:
    if precision.plan.kv_cache != "fp8":
        draft.put("precision_plan.kv_cache", f"{GENERATION}.kv_cache_dtype", "auto")
    elif backend != "megatron":
        draft.cannot("precision_plan.kv_cache", "only the megatron backend computes scales for FP8; BF16 is used")
    elif algorithm.asynchronous is not None:
        draft.cannot("precision_plan.kv_cache", "asynchronous generation does not support an FP8 cache; BF16 is used")
    else:
        draft.put("precision_plan.kv_cache", f"{GENERATION}.kv_cache_dtype", "fp8")


def _training(precision: Precision, backend: str, draft: Draft) -> None:
    plan = precision.plan
    if backend != "megatron":
        draft.cannot("nemo_rl.fp8_in", "only the megatron backend trains in FP8; BF16 is used")
        return
    if not plan.uses_fp8:
        return
    if precision.high:
        draft.cannot("precision_plan.rules", "NeMo-RL trains either all linear layers in FP8 or none; all are in FP8")
    values = {"enabled": True, "fp8": plan.format, "fp8_recipe": plan.recipe, "fp8_param": False}
    draft.put_all("precision_plan", TRAINING, values)
