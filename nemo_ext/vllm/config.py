"""Configs of our formats as vLLM wants them: sizes and kinds of blocks by the names that it reads.

They stand in for the Python files of an exported folder, so that vLLM runs none of them.
"""

from typing import Any

from transformers import PreTrainedConfig

from nemo_ext.checkpoint import formats
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.formats.decilm import beyond_vllm
from nemo_ext.checkpoint.formats.format import Format
from nemo_ext.checkpoint.remote_code.configuration_decilm import DeciLMConfig
from nemo_ext.checkpoint.remote_code.configuration_nemo_ext_blocks import NemoExtBlocksConfig
from nemo_ext.vllm import CLASSES


def model_of(config: PreTrainedConfig) -> tuple[Format, Description]:
    """The format and the model of a config as vLLM has it, `hf_overrides` included.

    Raises:
        ValueError: a setting that the model class cannot compute.
    """
    values = config.to_diff_dict() | {"architectures": [config.format]}
    for key in ("quantization_config", "num_key_value_heads"):  # the linears' own matter; what `DeciConfig` adds
        values.pop(key, None)
    return formats.read(values)


class BlocksConfig(NemoExtBlocksConfig):
    """`NemoExtBlocksForCausalLM`: where vLLM asks for one size of all blocks, it gets the largest."""

    format = "NemoExtBlocksForCausalLM"
    chunk_size = 128
    """Tokens of a chunk of Mamba-2's scan: Nemotron's, where vLLM's default of 2048 is for models without chunks."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = [CLASSES["mamba" in self.kinds]]

    @property
    def layers_block_type(self) -> list[str]:
        """The kind of each block; vLLM counts "attention" and "mamba"."""
        return self.kinds

    @property
    def num_attention_heads(self) -> int:
        """Attention heads of the block that has the most."""
        return self._most("attention", "num_attention_heads")

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of the block that has the most."""
        return self._most("attention", "num_key_value_heads")

    @property
    def head_dim(self) -> int:
        """Size of a head of the block where it is largest."""
        return self._most("attention", "head_dim")

    @property
    def n_routed_experts(self) -> int:
        """Experts of the block that has the most, 0 for a model without."""
        return self._most("moe", "n_routed_experts")

    @property
    def num_experts_per_tok(self) -> int:
        """Experts that a token goes to in the block where it goes to the most."""
        return self._most("moe", "num_experts_per_tok")

    def _most(self, kind: str, name: str) -> int:
        pairs = zip(self.blocks, self.kinds, strict=True)
        return max((block[name] for block, found in pairs if found == kind), default=0)


class DeciConfig(DeciLMConfig):
    """`DeciLMForCausalLM`: vLLM's own class, or ours where that has no such layers."""

    format = "DeciLMForCausalLM"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        description = model_of(self)[1] if self.block_configs else None
        if description is not None and beyond_vllm(description):
            self.architectures = [CLASSES[0]]
            # Another name than the registered one, by which vLLM would read the first layer's heads.
            self.model_type = BlocksConfig.model_type
            attention = [block for block in description.blocks if block.kind == "*" and not block.is_linear]
            self.num_key_value_heads = max((block.size("kv") for block in attention), default=self.num_attention_heads)


CONFIGS = (BlocksConfig, DeciConfig)
