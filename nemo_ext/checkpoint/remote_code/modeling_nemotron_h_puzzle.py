"""NemotronHPuzzle: transformers' NemotronH, with each block built from its own config. Without multi-token prediction.

Copied beside an exported config.json, so it imports nothing but torch, transformers and its own configuration.
"""

from torch import nn
from transformers.conversion_mapping import (
    WeightConverter,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHBlock,
    NemotronHForCausalLM,
    NemotronHModel,
    NemotronHRMSNorm,
)

from .configuration_nemotron_h_puzzle import NemotronHPuzzleConfig


def build_block(config: NemotronHPuzzleConfig, layer_idx: int) -> NemotronHBlock:
    """A block of its own sizes.

    Raises:
        ValueError: The block has a sliding window, which this model does not compute.
    """
    own = config.get_nemotron_h_config_for_layer(layer_idx)
    if own.sliding_window is not None:
        raise ValueError(
            f"block_configs[{layer_idx}].sliding_window={own.sliding_window}: not supported, serve with vLLM"
        )
    block = NemotronHBlock(own, layer_idx)
    for module in block.modules():
        if hasattr(module, "config"):
            # From here on only implementations are read, which may be set later on the model's config.
            module.config = config
    return block


class NemotronHPuzzleModel(NemotronHModel):
    config: NemotronHPuzzleConfig

    def __init__(self, config: NemotronHPuzzleConfig) -> None:
        # Not NemotronHModel's constructor, which would build blocks of one size.
        super(NemotronHModel, self).__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(build_block(config, index) for index in range(config.num_hidden_layers))
        self.norm_f = NemotronHRMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    """NemotronH's language model head, loss and generation over `NemotronHPuzzleModel`."""

    config: NemotronHPuzzleConfig

    def __init__(self, config: NemotronHPuzzleConfig) -> None:
        super(NemotronHForCausalLM, self).__init__(config)
        self.model = NemotronHPuzzleModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# transformers stacks a block's experts in memory; tensors begin with `model.`, without NemotronH's renaming.
for name in ("NemotronHPuzzleForCausalLM", "NemotronHPuzzleModel"):
    register_checkpoint_conversion_mapping(
        name,
        [each for each in get_checkpoint_conversion_mapping("nemotron_h") if isinstance(each, WeightConverter)],
        overwrite=True,
    )
