"""Loading of a model into this package's engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nemo_ext.chat.template import end_tokens
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.quantization.job import resolved_device
from nemo_ext.serving.app import Served
from nemo_ext.serving.engine import Engine
from nemo_ext.serving.settings import ServingSettings

CHUNK = 32
"""Chunk size in tokens for Mamba-2 on a CPU."""


def load(folder: Path, settings: ServingSettings, config: Mapping[str, Any]) -> Served:
    """Load a model and its tokenizer, and start the engine.

    Raises:
        ValueError: code in the directory requires the user's consent, or the tokenizer cannot be loaded.
    """
    trusted = may_run_code(str(folder), config)
    device = resolved_device(settings.device)
    dtype = settings.dtype or ("float32" if device == "cpu" else "auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={folder}: the tokenizer cannot be loaded ({error}); add one with "
            "`nemo-ext convert files_from=FOLDER`"
        ) from None
    its = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    if device == "cpu" and hasattr(its, "chunk_size"):
        # Chunks of 128 tokens suit GPU kernels; in plain torch their quadratic part takes most of the time.
        its.chunk_size = min(its.chunk_size, CHUNK)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=its, dtype=dtype if dtype == "auto" else getattr(torch, dtype), trust_remote_code=trusted
    )
    generation = GenerationConfig.from_model_config(model.config)
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder)
    longest = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    defaults = {name: getattr(generation, name, None) for name in ("temperature", "top_p", "top_k")}
    return Served(
        name=settings.name,
        engine=Engine(model.to(device).eval(), max_batch=settings.max_batch),
        tokenizer=tokenizer,
        ends=end_tokens(tokenizer, generation=generation),
        length=min(settings.max_length or longest, longest),
        defaults={name: value for name, value in defaults.items() if value is not None and generation.do_sample},
    )
