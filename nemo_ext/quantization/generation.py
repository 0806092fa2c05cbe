"""Generation in a plan's precision: arguments of vLLM for an exported checkpoint and for one in BF16."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import EMBEDDING, HEAD, NO_FP8, Plan
from nemo_ext.quantization.modelopt import Matrix

_NEVER = NO_FP8 | {HEAD}
ONLINE = {
    "tensorwise": "fp8_per_tensor",
    "delayed": "fp8_per_tensor",
    "blockwise": "fp8_per_block",
    "mxfp8": "mxfp8",
}
"""Scaling of a plan -> vLLM's scheme for weights that it quantises while loading them
(docs/features/quantization/online.md). Scales of inputs are dynamic."""


def vllm_arguments(plan: Plan) -> dict[str, Any]:
    """Keywords of `vllm.LLM` for a checkpoint of `nemo-ext quantize`, whose config.json covers all but the KV cache."""
    return {"kv_cache_dtype": "fp8"} if plan.kv_cache == "fp8" else {}


def online_arguments(plan: Plan, listed: Sequence[Matrix]) -> dict[str, Any]:
    """Keywords of `vllm.LLM` for a BF16 checkpoint that vLLM quantises by the plan while loading it.

    Args:
        plan: precision plan of the weights.
        listed: the checkpoint's matrices with their precisions.

    Raises:
        ValueError: vLLM cannot do what the plan asks for.
    """
    if any(matrix.weight.part == HEAD and matrix.precision == "fp8" for matrix in listed):
        raise ValueError(
            "precision_plan.rules: vLLM keeps the output layer in BF16 where it quantises itself: head bf16"
        )
    given = vllm_arguments(plan)
    low = [matrix for matrix in listed if matrix.precision == "fp8"]
    if not low:
        return given
    # vLLM has its own names before `layers.`, and looks up q, k and v one by one where it has them in one module.
    ignored = [f"re:.*{re.escape(name)}$" for name in high_modules(listed)]
    return {
        "quantization": ONLINE[plan.recipe],
        **given,
        **({"quantization_config": {"ignore": ignored}} if ignored else {}),
    }


def high_modules(listed: Sequence[Matrix]) -> list[str]:
    """Linear modules outside FP8 by their names from `layers.` on, the experts of a block as one module.

    Modules that engines never run in FP8 are left out: routers, convolutions, embedding and output layer.
    """
    return _names(matrix for matrix in listed if matrix.precision != "fp8" and matrix.weight.part not in _NEVER)


def never_quantised(listed: Sequence[Matrix]) -> list[str]:
    """Routers, convolutions and output layer that `high_modules` leaves out, for engines that must be told."""
    return _names(m for m in listed if m.precision != "fp8" and m.weight.part in _NEVER - {EMBEDDING})


def _names(matrices: Iterable[Matrix]) -> list[str]:
    names = (re.sub(r"\.experts\..*", ".experts", matrix.module) for matrix in matrices)
    return list(dict.fromkeys(name[max(name.find("layers."), 0) :] for name in names))


def cli_words(arguments: dict[str, Any]) -> list[str]:
    """Keywords of `vllm.LLM` as arguments of `vllm serve`."""
    words = []
    for key, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{key.replace('_', '-')}", text]
    return words


def serve_words(folder: Path, plan: Plan) -> list[str]:
    """Words of the command that serves a checkpoint of `nemo-ext quantize`, quoted for a shell."""
    return [shlex.quote(word) for word in ("vllm", "serve", str(folder), *cli_words(vllm_arguments(plan)))]
