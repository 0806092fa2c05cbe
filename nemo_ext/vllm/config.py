"""Configs of our formats as vLLM wants them: sizes and kinds of blocks by the names that it reads.

They stand in for the Python files of an exported folder, so that vLLM runs none of them.
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
"""Names that vLLM knows the model classes of `nemo_ext.vllm.model` by; the second has Mamba-2 blocks."""
_NOT_THE_MODELS = ("quantization_config", "compression_config", "head_dtype", "num_key_value_heads")
"""Keys that are the linears' own matter or vLLM's, and the one that `DeciLMConfig` below adds."""


def model_of(config: PreTrainedConfig) -> tuple[Format, Description]:
    """The format and the model of a config as vLLM has it, `hf_overrides` included.

    Raises:
        ValueError: a setting that the model class cannot compute.
    """
    values = config.to_diff_dict() | {"architectures": [config.format]}
    return formats.read({key: value for key, value in values.items() if key not in _NOT_THE_MODELS})


class _Most:
    """The largest of a size that every block of a kind has, 0 without such blocks; a config may be given another."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        pairs = zip(config.blocks, config.kinds, strict=True)
        return max((block[self.name] for block, kind in pairs if kind == self.kind), default=0)


# Both have the names of the classes that exported folders carry: transformers compares names where it loads such a
# folder in a process of vLLM.
class NemoExtBlocksConfig(configuration_nemo_ext_blocks.NemoExtBlocksConfig):
    """Config of our own format: where vLLM asks for one size of all blocks, it gets the largest."""

    format = "NemoExtBlocksForCausalLM"
    chunk_size = 128
    """Tokens of a chunk of Mamba-2's scan: Nemotron's, where vLLM's default of 2048 is for models without chunks."""
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
        """The kind of each block; vLLM counts "attention" and "mamba"."""
        return self.kinds


class DeciLMConfig(configuration_decilm.DeciLMConfig):
    """Config of `DeciLMForCausalLM`: for vLLM's own class, or for ours where that has no such layers."""

    format = "DeciLMForCausalLM"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        try:
            _, description = model_of(self)
        except ValueError:
            return  # vLLM's own class says what it makes of it
        if beyond_vllm(description):
            self.architectures = [CLASSES[0]]
            # Another name than the registered one, by which vLLM would read the first layer's heads.
            self.model_type = NemoExtBlocksConfig.model_type
            attention = [block for block in description.blocks if block.kind == "*" and not block.is_linear]
            self.num_key_value_heads = max((block.size("kv") for block in attention), default=self.num_attention_heads)

    def _layer(self, layer: dict[str, Any], path: str) -> Namespace:
        try:
            return super()._layer(layer, path)
        except ValueError:
            return Namespace({name: Namespace(part) for name, part in layer.items()})


CONFIGS = (NemoExtBlocksConfig, DeciLMConfig)
