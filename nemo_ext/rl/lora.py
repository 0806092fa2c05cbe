"""Low-rank adapters (LoRA) with the package peft."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_ext.rl.settings import Lora

FUSED = "out_proj"
"""Linear layer of Mamba-2 whose weight transformers' fused kernels read directly, without calling its adapter."""


def check_targets(lora: Lora) -> None:
    """Raise ValueError if a layer of transformers' models is a target but cannot have an adapter."""
    if FUSED in (lora.targets or ()):
        raise ValueError(
            f"lora.targets: {FUSED} cannot have adapters, because fused kernels of Mamba-2 would ignore them; remove it"
        )


def adapters(lora: Lora) -> Any:
    """Return peft's config of the adapters; raise ValueError if peft is not installed or a target cannot have one."""
    check_targets(lora)
    # Models without Mamba-2 have no such layer.
    warnings.filterwarnings("ignore", message="You have passed exclude_modules")
    return _peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.scale,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) if lora.targets else "all-linear",
        exclude_modules=[FUSED],
    )


def merge_saved(model: str, adapter: Path, to: Path, *, trust_remote_code: bool) -> None:
    """Merge adapters in peft's format into a model and write it to a folder, without the tokenizer.

    Args:
        model: Hugging Face name or folder of the model.
        adapter: folder with adapter_config.json.
        trust_remote_code: whether Python files in the model's folder may run.
    """
    whole = import_module("transformers").AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", trust_remote_code=trust_remote_code
    )
    _peft().PeftModel.from_pretrained(whole, str(adapter)).merge_and_unload().save_pretrained(to)


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ValueError(f"lora requires peft ({error}); install it with pip install 'nemo_ext[lora]'") from None
