"""Configs that describe our formats to vLLM, with block sizes and types under the names that vLLM expects.

vLLM uses them instead of the Python files in an exported directory, which it therefore never runs.
"""

from typing import Any

from transformers import PreTrainedConfig

from nemo_ext.checkpoint import formats
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats.decilm import beyond_vllm
from nemo_ext.checkpoint.formats.format import Format
from nemo_ext.checkpoint.remote_code import configuration_decilm, configuration_nemo_ext_blocks
from nemo_ext.checkpoint.remote_code.configuration_decilm import Namespace

HYBRID = "NemoExtHybridBlocksForCausalLM"
CLASSES = ("NemoExtBlocksForCausalLM", HYBRID)
"""Registered names of the model classes in `nemo_ext.vllm.model`; the second is for models with Mamba-2 blocks."""
_NOT_THE_MODELS = ("quantization_config", "compression_config", "head_dtype", "num_key_value_heads")
"""Keys that do not describe the architecture: those for quantised layers, vLLM's, and one that `DeciLMConfig` adds."""


def model_of(config: PreTrainedConfig) -> tuple[Format, Description]:
    """Read a model's format and description from vLLM's config, including `hf_overrides`.

    Raises:
        ValueError: the model class does not support a setting.
    """
    values = config.to_diff_dict() | {"architectures": [config.format]}
    return formats.read({key: value for key, value in values.items() if key not in _NOT_THE_MODELS})


class _Most:
    """Descriptor for the maximum of the size `name` over all blocks of one kind; 0 if there are no such blocks."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        pairs = zip(config.blocks, config.kinds, strict=True)
        return max((block[self.name] for block, kind in pairs if kind == self.kind), default=0)


# Both have the names of the classes in exported directories, because transformers compares the names when it loads such
# a directory in a vLLM process.
class NemoExtBlocksConfig(configuration_nemo_ext_blocks.NemoExtBlocksConfig):
    """Config of our own format; where vLLM expects one size for all blocks, it holds the maximum."""

    format = "NemoExtBlocksForCausalLM"
    chunk_size = 128
    """Tokens per chunk in Mamba-2's scan, as in Nemotron; vLLM's default, 2048, is for models without chunks."""
    num_attention_heads = _Most("attention", "num_attention_heads")
    num_key_value_heads = _Most("attention", "num_key_value_heads")
    head_dim = _Most("attention", "head_dim")
    n_routed_experts = _Most("moe", "n_routed_experts")
    num_experts_per_tok = _Most("moe", "num_experts_per_tok")

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = [CLASSES["mamba" in self.kinds]]

    @property
    def layers_block_type(self) -> list[str]:
        """Kind of each block; vLLM counts the "attention" and "mamba" blocks."""
        return self.kinds


class DeciLMConfig(configuration_decilm.DeciLMConfig):
    """Config of `DeciLMForCausalLM`, which selects vLLM's class, or ours if vLLM's does not support the layers."""

    format = "DeciLMForCausalLM"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        try:
            _, description = model_of(self)
        except ValueError:
            return  # vLLM's class reports the error
        if beyond_vllm(description):
            self.architectures = [CLASSES[0]]
            # With the registered name, vLLM would read the first layer's number of heads.
            self.model_type = NemoExtBlocksConfig.model_type
            attention = [block for block in description.blocks if block.kind == "*" and not block.is_linear]
            self.num_key_value_heads = max((block.size("kv") for block in attention), default=self.num_attention_heads)

    def _layer(self, layer: dict[str, Any], path: str) -> Namespace:
        try:
            return super()._layer(layer, path)
        except ValueError:
            return Namespace({name: Namespace(part) for name, part in layer.items()})


CONFIGS = (NemoExtBlocksConfig, DeciLMConfig)
