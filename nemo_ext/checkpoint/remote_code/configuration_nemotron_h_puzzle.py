"""NemotronHPuzzle: NemotronH's keys and one entry of `block_configs` per block, whose keys replace those of the model.

Copied beside an exported config.json, so it imports nothing but transformers. vLLM asks for the config of each block.
"""

import copy
from typing import Any

from transformers import NemotronHConfig

SIZES = {
    "mamba": ("ssm_state_size",),
    "attention": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    "mlp": ("intermediate_size",),
}
"""Sizes that every block of a type has. Others, such as `moe_latent_size`, may be absent in some blocks."""


class NemotronHPuzzleConfig(NemotronHConfig):
    """NemotronH's configuration with blocks of different sizes.

    A size that blocks set themselves has the maximum of all blocks at the top level, for engines that ask for one
    number; the blocks that do not set it have the top level's own in their entries.

    Attributes:
        block_configs: One `{"block_type": ..., sizes}` per block.
        mtp_block_configs: The same for the blocks of a depth of multi-token prediction.

    Raises:
        ValueError: Names the entry without a known `block_type`.
    """

    model_type = "nemotron_h_puzzle"

    def __init__(
        self,
        block_configs: list[dict[str, Any]] | None = None,
        mtp_block_configs: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        lists = {"block_configs": block_configs or [], "mtp_block_configs": mtp_block_configs or []}
        types = {name: [_type(f"{name}[{n}]", block) for n, block in enumerate(lists[name])] for name in lists}
        for key in ("hybrid_override_pattern", "mtp_hybrid_override_pattern", "num_hidden_layers"):
            kwargs.pop(key, None)
        kwargs["layers_block_type"] = types["block_configs"] or kwargs.get("layers_block_type")
        kwargs["mtp_layers_block_type"] = types["mtp_block_configs"] or kwargs.get("mtp_layers_block_type")
        super().__init__(**kwargs)
        self.block_configs, self.mtp_block_configs = ([dict(block) for block in blocks] for blocks in lists.values())
        for kind, sizes in SIZES.items():
            blocks = [b for b in (*self.block_configs, *self.mtp_block_configs) if b["block_type"] == kind]
            for key in sizes:
                if any(block.get(key) is not None for block in blocks):
                    for block in blocks:
                        if block.get(key) is None:
                            block[key] = getattr(self, key)
                    setattr(self, key, max(block[key] for block in blocks if block[key] is not None))

    def get_nemotron_h_config_for_layer(self, layer_idx: int) -> NemotronHConfig:
        """Config of one block; blocks of multi-token prediction are numbered after those of the model."""
        own = copy.copy(self)
        for key, value in [*self.block_configs, *self.mtp_block_configs][layer_idx].items():
            if key != "block_type" and value is not None:
                setattr(own, key, value)
        return own

    @property
    def mtp_n_routed_experts(self) -> int:
        """Number of experts of multi-token prediction, which vLLM's draft model asks for."""
        moe = [block for block in self.mtp_block_configs if block["block_type"] == "moe"]
        return max((block.get("n_routed_experts") or self.n_routed_experts for block in moe), default=0)


def _type(path: str, block: Any) -> str:
    kind = block.get("block_type") if isinstance(block, dict) else None
    if kind not in SIZES:
        raise ValueError(f"{path}.block_type: expected one of {', '.join(SIZES)}, got {kind!r}")
    return str(kind)
