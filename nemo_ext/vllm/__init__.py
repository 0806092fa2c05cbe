"""vLLM plug-in that serves models of any sequence of blocks without running code from the model's directory.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`).
"""


def register() -> None:
    """Register our model classes and their configs with vLLM and transformers; further calls have no effect."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, NemotronHForCausalLMConfig

    from nemo_ext.checkpoint.remote_code.configuration_nemotron_h_puzzle import NemotronHPuzzleConfig
    from nemo_ext.vllm.config import CLASSES, CONFIGS, HYBRID

    for config in (*CONFIGS, NemotronHPuzzleConfig):  # vLLM has the last one's class, but no config
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in CLASSES:
        ModelRegistry.register_model(name, f"nemo_ext.vllm.model:{name}")
    MODELS_CONFIG_MAP[HYBRID] = NemotronHForCausalLMConfig  # Mamba-2's state in float32 by default
