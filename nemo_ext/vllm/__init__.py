"""Plug-in of vLLM: it serves any sequence of blocks, without code of the model's folder.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
"""

CLASSES = ("NemoExtBlocksForCausalLM", "NemoExtHybridBlocksForCausalLM")
"""Names that vLLM knows the model classes of `nemo_ext.vllm.model` by; the second has Mamba-2 blocks."""


def register() -> None:
    """Make the model classes and their configs known to vLLM and transformers; a second call changes nothing."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from nemo_ext.vllm.config import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in CLASSES:
        ModelRegistry.register_model(name, f"nemo_ext.vllm.model:{name}")
