"""Checks whether vLLM can serve a precision plan, before any work starts.

Source: vllm/model_executor/layers/quantization/modelopt.py.
"""

from collections.abc import Sequence

from nemo_ext.architecture.precision import NVFP4_BLOCK
from nemo_ext.architecture.precision_plan import HEAD, LOW, RECIPES, Plan
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats import Format
from nemo_ext.quantization.modelopt import Matrix


def check_servable(
    plan: Plan, description: Description, checkpoint_format: Format, listed: Sequence[Matrix]
) -> list[str]:
    """Reject a plan whose checkpoint no engine can load, and collect remarks on a plan that can be served.

    Args:
        plan: precision plan of the weights.
        description: the model's description.
        checkpoint_format: format of the checkpoint.
        listed: the checkpoint's matrices with their precisions.

    Returns:
        Remarks for the user.

    Raises:
        ValueError: the plan cannot be served; the message gives the key and a remedy.
    """
    low = [matrix for matrix in listed if matrix.precision in LOW]
    if not low:
        raise ValueError(
            "precision_plan puts nothing in FP8 or NVFP4, so there is nothing to quantise: set "
            "precision=nemotron3_selective or precision_plan.default=fp8"
        )
    experts = [matrix for matrix in listed if ".experts." in matrix.tensor]
    for block in {matrix.weight.block for matrix in experts}:
        if len({m.precision if m.precision in LOW else "" for m in experts if m.weight.block == block}) > 1:
            raise ValueError(
                f"precision_plan.rules: the experts' fc1 and fc2 of block {block} have different precisions, but vLLM "
                "runs both in one kernel, so give them the same precision"
            )
    if any(matrix.weight.part == HEAD for matrix in low):
        raise ValueError(
            "precision_plan.rules: vLLM does not load a quantised output layer, so add the rule 'head bf16'"
        )
    fp8 = [matrix for matrix in low if matrix.precision == "fp8"]
    if plan.recipe == "blockwise" and any(".experts." in matrix.tensor for matrix in fp8):
        raise ValueError(
            "precision_plan.recipe=blockwise: vLLM does not support experts with ModelOpt's blocks of 128x128; use "
            "tensorwise or mxfp8, or add the rules 'E.fc1 bf16' and 'E.fc2 bf16'"
        )
    if wrong := _misfits([matrix for matrix in low if matrix.precision == "nvfp4"], NVFP4_BLOCK, description):
        raise ValueError(
            f"precision_plan: NVFP4 does not support the shape of {len(wrong)} tensors ({wrong[0]}): exclude them with "
            "precision_plan.rules"
        )
    wrong = _misfits(fp8, RECIPES[plan.recipe], description)
    if wrong and plan.recipe in ("blockwise", "mxfp8"):
        raise ValueError(
            f"precision_plan.recipe={plan.recipe} does not support the shape of {len(wrong)} tensors ({wrong[0]}): set "
            "it to tensorwise"
        )
    remarks = [
        *checkpoint_format.remarks(description),
        "transformers does not read ModelOpt checkpoints: this one is for vLLM",
    ]
    if wrong:
        remarks.append(f"vLLM's FP8 kernels may pad or reject such sizes: {wrong[0]} ({len(wrong)} such)")
    if plan.recipe == "delayed":
        remarks.append("recipe delayed: there are no earlier training steps, so the scales come from calibration")
    if plan.recipe == "blockwise":
        remarks.append(
            "recipe blockwise: ModelOpt quantises only weights in blocks; vLLM quantises inputs dynamically in blocks "
            "of 1x128, which the comparison does not include"
        )
    return remarks


def _misfits(low: Sequence[Matrix], step: int, description: Description) -> list[str]:
    """Describe each matrix in `low` whose rows or columns are not multiples of `step`.

    In Mamba-2's input projection, blockwise scaling requires this of the rows of each part (z, x, B, C, dt).
    """
    wrong = []
    for matrix in low:
        *_, rows, columns = matrix.shape
        parts = [rows]
        # Blocks of scales start at each part of Mamba-2's input projection.
        if step == RECIPES["blockwise"] and matrix.weight.part == "in_proj" and matrix.weight.block is not None:
            block = description.blocks[matrix.weight.block]
            heads, head, state, groups = (block.size(name) for name in ("heads", "head_dim", "state", "groups"))
            parts = [heads * head] * 2 + [groups * state] * 2 + [heads]
        if any(size % step for size in (*parts, columns)):
            shape = f"{rows} ({' + '.join(map(str, parts))})" if len(parts) > 1 else f"{rows}"
            wrong.append(f"{matrix.tensor} is {shape}x{columns}, not a multiple of {step}")
    return wrong
