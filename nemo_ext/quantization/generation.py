"""vLLM's arguments for generating in a plan's precision, from an exported or a BF16 checkpoint."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import EMBEDDING, HEAD, LOW, NO_FP8, Plan
from nemo_ext.quantization.modelopt import Matrix

_NEVER = NO_FP8 | {HEAD}
ONLINE = {
    "tensorwise": "fp8_per_tensor",
    "delayed": "fp8_per_tensor",
    "blockwise": "fp8_per_block",
    "mxfp8": "mxfp8",
}
"""Mapping from a plan's FP8 recipe to vLLM's scheme for quantising weights while loading them
(docs/features/quantization/online.md). Input scales are dynamic."""


def vllm_arguments(plan: Plan) -> dict[str, Any]:
    """Return `vllm.LLM` arguments for a `nemo-ext quantize` checkpoint, whose config.json sets all but the KV cache."""
    return {"kv_cache_dtype": "fp8"} if plan.kv_cache == "fp8" else {}


def online_arguments(plan: Plan, listed: Sequence[Matrix]) -> dict[str, Any]:
    """Return the `vllm.LLM` arguments for a BF16 checkpoint that vLLM quantises as planned while loading it.

    Args:
        plan: precision plan of the weights.
        listed: the checkpoint's matrices with their precisions.

    Raises:
        ValueError: vLLM does not support the plan.
    """
    if plan.uses_nvfp4:
        raise ValueError(
            "precision_plan: vLLM does not quantise to NVFP4 while loading; write a checkpoint with `nemo-ext quantize`"
        )
    if any(matrix.weight.part == HEAD and matrix.precision == "fp8" for matrix in listed):
        raise ValueError(
            "precision_plan.rules: vLLM's online quantisation keeps the output layer in BF16, so add the rule 'head "
            "bf16'"
        )
    arguments = vllm_arguments(plan)
    low = [matrix for matrix in listed if matrix.precision == "fp8"]
    if not low:
        return arguments
    # vLLM has other prefixes before `layers.`, and looks up q, k and v separately even if they are one module.
    ignored = [f"re:.*{re.escape(name)}$" for name in high_modules(listed)]
    return {
        "quantization": ONLINE[plan.recipe],
        **arguments,
        **({"quantization_config": {"ignore": ignored}} if ignored else {}),
    }


def high_modules(listed: Sequence[Matrix]) -> list[str]:
    """List the names of linear modules outside FP8, without the prefix before `layers.`; a block's experts are one.

    Modules that engines never run in FP8 are omitted: routers, convolutions, embedding and output layer.
    """
    return _names(matrix for matrix in listed if matrix.precision not in LOW and matrix.weight.part not in _NEVER)


def never_quantised(listed: Sequence[Matrix]) -> list[str]:
    """List routers, convolutions and output layer, which `high_modules` omits, for engines that need them listed."""
    return _names(m for m in listed if m.precision not in LOW and m.weight.part in _NEVER - {EMBEDDING})


def _names(matrices: Iterable[Matrix]) -> list[str]:
    names = (re.sub(r"\.experts\..*", ".experts", matrix.module) for matrix in matrices)
    return list(dict.fromkeys(name[max(name.find("layers."), 0) :] for name in names))


def cli_words(arguments: dict[str, Any]) -> list[str]:
    """Convert arguments of `vllm.LLM` to command-line arguments of `vllm serve`."""
    words = []
    for key, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{key.replace('_', '-')}", text]
    return words


def serve_words(folder: Path, plan: Plan) -> list[str]:
    """Return the shell-quoted words of the command that serves a checkpoint made by `nemo-ext quantize`."""
    return [shlex.quote(word) for word in ("vllm", "serve", str(folder), *cli_words(vllm_arguments(plan)))]
